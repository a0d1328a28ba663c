"""The process that listens at a port of this machine, for messages."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

_PROCESSES = Path("/proc")
_TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
_LISTENING = "0A"  # the state of a socket in these tables


def listener_at(port: int) -> str | None:
    """The process that listens at `port`, as "process 123 (python train.py)"; None if this system or user cannot see it."""
    sockets = {f"socket:[{inode}]" for inode in _listening(port)}
    for process in _PROCESSES.glob("[0-9]*") if sockets else ():
        if not sockets.isdisjoint(_open_files(process)):
            return f"process {process.name} ({_command(process)[:200]})"
    return None


def _open_files(process: Path) -> Iterator[str]:
    """The targets of a process's open files; none if it is another user's, or has ended meanwhile."""
    with contextlib.suppress(OSError):
        for handle in (process / "fd").iterdir():
            with contextlib.suppress(OSError):  # it was closed meanwhile
                yield os.readlink(handle)


def _command(process: Path) -> str:
    with contextlib.suppress(OSError):
        return (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    return "ended meanwhile"


def _listening(port: int) -> Iterator[str]:
    """The inodes of the sockets that listen at `port`."""
    for table in _TABLES:
        for row in table.read_text().splitlines()[1:] if table.exists() else ():
            fields = row.split()
            if fields[3] == _LISTENING and int(fields[1].rpartition(":")[2], 16) == port:
                yield fields[9]
