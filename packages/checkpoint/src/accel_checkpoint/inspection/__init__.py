"""Looking into checkpoints without a run: `python -m accel_core checkpoint`."""
