"""The processes that a launcher started on this machine: their ends, when and how, and their stop.

What a process has left behind is looked at, and not taken: who started it (torch's agent) still
finds it there. As long as that has not been taken, the numbers of processes and their groups cannot
be given to others.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

CAN_LOOK = hasattr(os, "waitid")
"""Whether ends can be looked at on this platform; not on Windows, nor on macOS before Python 3.13. Torch's agent then is alone."""

_NAP = 0.01


class Ending(NamedTuple):
    """The end of one process."""

    status: int  # its exit status; the negative number of the signal that killed it
    time: float  # when that was seen, in seconds since the epoch


class Ranks:
    """The processes of one attempt, by rank; each leads a group of processes.

    Signals are sent to each rank alone, or with `groups` to all that it has started, too.
    """

    def __init__(self, pids: Mapping[int, int], groups: bool = False) -> None:
        self.pids, self._groups = dict(pids), groups
        self.endings: dict[int, Ending] = {}  # in the order in which they ended
        self.stopped_at: float | None = None  # when they were first told to end, in seconds since the epoch
        self.killed: list[int] = []  # ranks that did not end in time
        self.halted: list[int] = []  # ranks that had been halted (SIGSTOP, or a debugger) when they were told to end

    @property
    def running(self) -> list[int]:
        """The ranks whose processes have not been seen to end."""
        return [rank for rank in self.pids if rank not in self.endings]

    def look(self) -> None:
        """Notes who has ended since the last look."""
        for rank in self.running:
            found = _peek(self.pids[rank], os.WEXITED)
            if found is not None:
                exited = found.si_code == os.CLD_EXITED
                self.endings[rank] = Ending(found.si_status if exited else -found.si_status, time.time())

    def tell(self, number: signal.Signals) -> None:
        """Sends a signal to all that run; who was halted goes on, so as to notice."""
        # The workers of a DataLoader are in the group of their rank. They would die of the signal, and the rank of their death,
        # before it can save.
        send = os.killpg if self._groups else os.kill
        for rank in self.running:
            _send(send, self.pids[rank], number)
            _send(os.killpg, self.pids[rank], signal.SIGCONT)

    def stop(self, number: signal.Signals, patience: float) -> None:
        """Tells all to end; kills those left after `patience` seconds, with all that they started.

        Returns when all have ended; one that the kernel does not let go is waited for five seconds.
        """
        self.look()
        if self.stopped_at is None:
            self.stopped_at = time.time()
            self.halted = [rank for rank in self.running if _peek(self.pids[rank], os.WSTOPPED) is not None]
        self.tell(number)
        self._wait(patience)
        self.killed += [rank for rank in self.running if rank not in self.killed]
        for pid in self.pids.values():
            _send(os.killpg, pid, signal.SIGKILL)
        self._wait(5.0)

    def _wait(self, patience: float) -> None:
        deadline = time.monotonic() + patience
        self.look()
        while self.running and time.monotonic() < deadline:
            time.sleep(_NAP)
            self.look()


def _peek(pid: int, what: int) -> os.waitid_result | None:
    """The exit or stop of a child, not reaped; None if there is none, or it was reaped already."""
    try:
        return os.waitid(os.P_PID, pid, what | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None


def _send(send: Callable[[int, int], None], pid: int, number: signal.Signals) -> None:
    # It has ended; or is of another user by now, and not ours to end.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        send(pid, number)
