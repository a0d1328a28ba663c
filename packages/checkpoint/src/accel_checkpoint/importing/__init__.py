"""Checkpoints of other libraries as neutral ones: `accel checkpoint import`."""
