"""Folders that `save_state` of Hugging Face Accelerate wrote: `load_state` reads them, and `accel checkpoint import`.

folder          which files are there
pickled_file    files of `torch.save`, of which nothing is run
model_files, optimizer_files, run_files      their content, as entries of a neutral checkpoint
distributed_files      folders of torch.distributed.checkpoint, which sharded strategies write
importer        all of it, as accel-checkpoint loads and writes it
"""

from __future__ import annotations

from accel_compat.checkpoints.folder import is_peer_folder, newest_folder
from accel_compat.checkpoints.importer import load_peer_state, open_accelerate

__all__ = ["is_peer_folder", "load_peer_state", "newest_folder", "open_accelerate"]
