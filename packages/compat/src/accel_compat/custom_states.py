"""States of a script's own objects, each in a file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from accel_compat.state import PartialState

_FILE = "custom_checkpoint_{}.pkl"


def save_custom_state(obj: Any, path: str | os.PathLike[str], index: int = 0, save_on_each_node: bool = False) -> None:
    """Writes `obj.state_dict()` into a folder, on the main process, or on that of each machine."""
    state = PartialState()
    if state.is_local_main_process if save_on_each_node else state.is_main_process:
        torch.save(obj.state_dict(), Path(path) / _FILE.format(index))


def load_custom_state(obj: Any, path: str | os.PathLike[str], index: int = 0) -> None:
    """Gives `obj.load_state_dict` what `save_custom_state` wrote; nothing in the file is executed."""
    obj.load_state_dict(torch.load(Path(path) / _FILE.format(index), map_location="cpu", weights_only=True))
