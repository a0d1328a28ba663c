"""Connections of process groups, shut down so that a collective of gloo raises where it waits."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Store

_DESCRIPTORS = Path("/proc/self/fd")


class Connections:
    """Connections opened while groups were made, but those to `store`; none without `/proc`."""

    def __init__(self, store: Store) -> None:
        innermost: Any = store
        while hasattr(innermost, "underlying_store"):
            innermost = innermost.underlying_store
        self._store_port = getattr(innermost, "port", -1)  # only a store of TCP has one
        self._known: set[str] = set()

    @contextlib.contextmanager
    def made_here(self) -> Iterator[None]:
        """A block that makes a process group."""
        before = _sockets()
        try:
            yield
        finally:
            for name, descriptor in _sockets().items():
                if name not in before and self._store_port not in _ports(descriptor):
                    self._known.add(name)

    def break_off(self, groups: list[ProcessGroup]) -> None:
        """Makes what waits in these groups raise, and whatever comes after."""
        for group in groups:
            with contextlib.suppress(RuntimeError, NotImplementedError):  # not every backend can, and some need not
                group.abort()
        for name, descriptor in _sockets().items():
            # One that listens is left alone, for it has no peer: its owner would abort the process.
            if name in self._known and _ports(descriptor):
                with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
                    connection.shutdown(socket.SHUT_RDWR)


def _sockets() -> dict[str, int]:
    """This process's sockets: names in the kernel, which are never given twice; descriptors."""
    found: dict[str, int] = {}
    with contextlib.suppress(OSError):
        for entry in os.listdir(_DESCRIPTORS):
            with contextlib.suppress(OSError):  # closed meanwhile
                name = os.readlink(_DESCRIPTORS / entry)
                if name.startswith("socket:"):
                    found[name] = int(entry)
    return found


def _ports(descriptor: int) -> set[int]:
    """Those of both ends of a connection of TCP; of neither for what is no connection."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
        if connection.family in (socket.AF_INET, socket.AF_INET6):
            return {connection.getsockname()[1], connection.getpeername()[1]}
    return set()
