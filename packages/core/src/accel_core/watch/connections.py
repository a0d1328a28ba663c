"""The connections of process groups, and how to break those of this process.

A thread that waits in a collective of gloo cannot be called back: its backend has nothing to abort it with. When the others
will never come, its sockets are shut down instead; then the collective raises in the thread that waits, at its own line, and
the program ends like any other that failed: `finally` blocks run, trackers close, a traceback shows the place.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_DESCRIPTORS = Path("/proc/self/fd")


class Connections:
    """What was connected while process groups were made; empty where there is no `/proc`."""

    def __init__(self) -> None:
        self._known: set[str] = set()

    @contextlib.contextmanager
    def made_here(self) -> Iterator[None]:
        """A block that makes a process group. The stores at which ranks meet are to be connected before it."""
        before = set(_sockets())
        try:
            yield
        finally:
            self._known |= set(_sockets()) - before

    def break_off(self, groups: list[ProcessGroup]) -> None:
        """Makes what waits in these groups raise, and whatever comes after."""
        for group in groups:
            with contextlib.suppress(RuntimeError, NotImplementedError):  # not every backend can, and some need not
                group.abort()
        for name, descriptor in _sockets().items():
            if name in self._known:
                _shut(descriptor)


def _sockets() -> dict[str, int]:
    """The sockets of this process: their names in the kernel, which are never given twice, and descriptors."""
    found: dict[str, int] = {}
    with contextlib.suppress(OSError):
        for entry in os.listdir(_DESCRIPTORS):
            with contextlib.suppress(OSError):  # closed meanwhile
                name = os.readlink(_DESCRIPTORS / entry)
                if name.startswith("socket:"):
                    found[name] = int(entry)
    return found


def _shut(descriptor: int) -> None:
    """Ends a connection in both directions. One that listens is left alone: its owner would abort the process."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
        connection.getpeername()
        connection.shutdown(socket.SHUT_RDWR)
