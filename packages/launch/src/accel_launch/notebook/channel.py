"""The unnamed file between a launcher of notebooks and its ranks: the ranks' standard input.

It is in no folder, so that nobody else can put a pickle there, and it is gone with the last process
that has it. Each record says whose it is: the first is the work for all ranks, the others are what
ranks have to say, of which the last of each counts.

Imports nothing but the standard library, for ranks read it first of all.
"""

from __future__ import annotations

import fcntl
import os
import struct
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

_HEAD = struct.Struct("<qq")  # whose record it is, and its length
_LARGEST = 1 << 30  # bytes of one call of the system
WORK = -1
"""Whose record the work is."""


@contextmanager
def opened(work: bytes) -> Iterator[int]:
    """A block in which started processes have the file as standard input. Gives its descriptor."""
    with tempfile.TemporaryFile() as file:
        append(file.fileno(), WORK, work)
        before = os.dup(0)
        os.dup2(file.fileno(), 0)
        try:
            yield file.fileno()
        finally:
            os.dup2(before, 0)
            os.close(before)


def take_over() -> int:
    """The descriptor of the file in a rank, whose standard input is empty from now on."""
    taken, nothing = os.dup(0), os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    return taken


def append(descriptor: int, whose: int, content: bytes) -> None:
    """Adds a record, in place of an incomplete one. One process at a time does so."""
    left = memoryview(_HEAD.pack(whose, len(content)) + content)
    fcntl.lockf(descriptor, fcntl.LOCK_EX)
    try:
        place = max((start + size for _, start, size in _whole(descriptor)), default=0)
        os.ftruncate(descriptor, place)
        while left:
            written = os.pwrite(descriptor, left[:_LARGEST], place)
            left, place = left[written:], place + written
    finally:
        fcntl.lockf(descriptor, fcntl.LOCK_UN)


def records(descriptor: int) -> dict[int, bytes]:
    """The last record of each."""
    return {
        whose: b"".join(
            os.pread(descriptor, min(_LARGEST, size - done), start + done) for done in range(0, size, _LARGEST)
        )
        for whose, start, size in _whole(descriptor)
    }


def _whole(descriptor: int) -> Iterator[tuple[int, int, int]]:
    """The complete records: owner, offset of the content, and its length."""
    place, end = 0, os.fstat(descriptor).st_size
    while place + _HEAD.size <= end:
        whose, size = _HEAD.unpack(os.pread(descriptor, _HEAD.size, place))
        place += _HEAD.size + size
        if place <= end:
            yield whose, place - size, size
