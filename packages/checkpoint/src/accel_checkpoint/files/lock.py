"""A lock on a folder, which names the writing process and is kept while that lives.

It is one of the kernel's (`flock`), so a kill lets it go. A file system or a platform without such
locks has none: then nobody is refused, as if there were no lock.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
from datetime import datetime, timezone
from pathlib import Path

from accel_checkpoint.files.disk import read_file
from accel_core import CheckpointError

if sys.platform != "win32":
    import fcntl

NAME = "saving.lock"


class Lock:
    """A lock on a data folder, until `release` or the end of the process. A pickle holds none."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / NAME
        since = datetime.now(timezone.utc).isoformat(timespec="seconds")
        holder = {"host": socket.gethostname(), "pid": os.getpid(), "since": since}
        self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        _locked(self._descriptor)
        os.write(self._descriptor, json.dumps(holder).encode())

    def release(self) -> None:
        """Removes the file, and lets go. Once is enough, and more do no harm."""
        with contextlib.suppress(OSError):  # it may have gone with its folder
            os.unlink(self._path)
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            if sys.platform != "win32":
                with contextlib.suppress(OSError):
                    fcntl.flock(descriptor, fcntl.LOCK_UN)  # also for processes that were forked meanwhile
            os.close(descriptor)

    def __del__(self) -> None:
        if getattr(self, "_descriptor", -1) >= 0:
            os.close(self._descriptor)

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()


def holder(folder: Path) -> str | None:
    """The process that writes into a folder, in words; None if none does that lives."""
    path = folder / NAME
    try:
        descriptor = os.open(path, os.O_RDWR | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOFOLLOW", 0))
    except OSError:
        return None
    try:
        return None if _locked(descriptor) else _words(path)
    finally:
        os.close(descriptor)  # which lets go of what was tried


def _locked(descriptor: int) -> bool:
    """Takes the lock, and says whether nobody else has it: also where there are no locks."""
    if sys.platform == "win32":
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return not isinstance(error, BlockingIOError)  # another one is of a network file system that has none
    return True


def _words(path: Path) -> str | None:
    try:
        found = json.loads(read_file(path, 1 << 12))
        host, pid, since = str(found["host"]), int(found["pid"]), str(found["since"])
    except (CheckpointError, OSError, ValueError, KeyError, TypeError):
        return "another process"
    if host == socket.gethostname() and not _lives(pid):
        return None  # it was killed, and a process that it forked has the lock still
    return f"process {pid} on {host}, since {since}"


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (OSError, OverflowError) as error:
        return not isinstance(error, ProcessLookupError)
    return True
