"""Files of weights that are read again and again: one that is written to meanwhile is noticed.

safetensors, `.bin` and `.dat` files have no hashes, so that another value in them is a silent wrong
result. A file that is open and was replaced or removed is read on as it was.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from accel_core import CheckpointError


class UnchangedFiles:
    """The sizes and times of files as they are now. Folders are left out: checkpoints have hashes.

    `open_anew`: whether each read opens its file again, so that it must not be replaced either.
    """

    def __init__(self, paths: Iterable[Path], open_anew: bool = False) -> None:
        self._seen = {path: _state_of(path) for path in set(paths) if path.is_file()}
        self._open_anew = open_anew

    def check(self, path: Path) -> None:
        """Raises `CheckpointError` if the file has been written to."""
        if (before := self._seen.get(path)) is None or (now := _state_of(path)) is None:
            return
        if now != before and (self._open_anew or now[:2] == before[:2]):
            raise CheckpointError(
                f"{path} was written to while a model reads its weights from it ({before[2]} bytes before, {now[2]} now). Load the model "
                f"again when the file is complete; to replace weights that are in use, write another file and rename it."
            )


def _state_of(path: Path) -> tuple[int, int, int, int] | None:
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
