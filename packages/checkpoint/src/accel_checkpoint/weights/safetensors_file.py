"""A safetensors file: its header, checked as the format demands, and data read from where it lies.

The library's reader maps the whole file: that takes as much address space as the file has bytes,
counts as memory beside the model's, and is killed where the file becomes shorter.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from accel_checkpoint.files.disk import open_file, read_into
from accel_checkpoint.files.stored import is_shape
from accel_checkpoint.weights.tensor_files import SAFETENSORS_DTYPES
from accel_core import CheckpointError

DTYPES = {name: dtype for dtype, name in SAFETENSORS_DTYPES.items()}
_BITS = {**{name: 8 * dtype.itemsize for name, dtype in DTYPES.items()}, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}
_LONGEST = 100_000_000  # bytes of a header, by the format


class Entry(NamedTuple):
    """A tensor of the file: `dtype` by the format's name; its data begins at byte `position`."""

    dtype: str
    shape: tuple[int, ...]
    position: int


class SafetensorsFile:
    """An open file, its `metadata` and its `tensors` by name. Threads may read at once.

    CheckpointError is raised for what is damaged or cut short, as far as its header shows it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = open_file(path)
        try:
            self._state = self._now()
            self.metadata, self.tensors = self._header()
        except BaseException as error:
            os.close(self._descriptor)
            if not isinstance(error, ValueError):
                raise
            raise CheckpointError(
                f"{path} should hold weights as safetensors, but it does not: {error}. It is damaged or cut short; save or "
                f"download it again."
            ) from error

    def close(self) -> None:
        """Closes the file."""
        os.close(self._descriptor)

    def read(self, position: int, place: memoryview) -> None:
        """Fills `place`. CheckpointError if the file was changed since it was opened."""
        count, now = read_into(self._descriptor, place, position, self.path), self._now()
        if count < len(place) or now[0] < self._state[0]:
            raise CheckpointError(f"{self.path} has become shorter while it was read. Read it when it is complete.")
        if now != self._state:
            raise CheckpointError(
                f"{self.path} was written to while its weights are in use. Load them again when it is complete; to replace it, write "
                f"another file and rename it."
            )

    def _now(self) -> tuple[int, int]:
        """Bytes, and when they were last written."""
        found = os.fstat(self._descriptor)
        return found.st_size, found.st_mtime_ns

    def _header(self) -> tuple[dict[str, str], dict[str, Entry]]:
        size = self._state[0]
        length = int.from_bytes(self._bytes(0, 8), "little")
        if not size >= 8 + length <= 8 + _LONGEST:
            raise ValueError(f"a header of {length} bytes in a file of {size}")
        try:
            header = json.loads(self._bytes(8, length))
        except RecursionError:
            raise ValueError("its header is nested too deep") from None
        if not isinstance(header, dict):
            raise ValueError("its header is no JSON object")
        metadata = header.pop("__metadata__", None) or {}
        if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
            raise ValueError("its metadata are no texts by name")
        return metadata, _entries(header, 8 + length, size)

    def _bytes(self, position: int, length: int) -> bytes:
        place = bytearray(length)
        return bytes(place[: read_into(self._descriptor, memoryview(place), position, self.path)])


def _entries(header: Mapping[str, Any], begin: int, size: int) -> dict[str, Entry]:
    """The tensors, whose data fill the file from `begin` on without gaps. ValueError otherwise."""
    entries: dict[str, Entry] = {}
    spans: list[tuple[int, int, str]] = []
    for name, entry in header.items():
        try:
            dtype, shape, (first, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
            sound = is_shape(shape) and type(first) is type(end) is int
            sound = sound and first >= 0 and _BITS[dtype] * math.prod(shape) == 8 * (end - first)
        except (KeyError, TypeError, ValueError):
            sound = False
        if not sound:
            raise ValueError(f"its header describes {name!r} as {entry!r:.200}")
        entries[name] = Entry(dtype, tuple(shape), begin + first)
        spans.append((begin + first, begin + end, name))
    position = begin
    for first, end, name in sorted(spans):
        if first != position:
            raise ValueError(f"{name!r} begins at byte {first}, and what is before it ends at {position}")
        position = end
    if position != size:
        raise ValueError(f"its tensors end at byte {position} of {size}")
    return entries
