"""Folders that DeepSpeed's `engine.save_checkpoint` and `ds_to_universal` write, for `accel checkpoint import`. DeepSpeed is not needed."""
