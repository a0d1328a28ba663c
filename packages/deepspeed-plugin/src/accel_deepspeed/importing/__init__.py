"""`accel checkpoint import` of `save_checkpoint` and `ds_to_universal`, without DeepSpeed."""
