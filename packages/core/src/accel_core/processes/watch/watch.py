"""The Watch, as the other parts of the library use it."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from accel_core.processes.watch.checks import Checks
from accel_core.processes.watch.collective_scope import Collective, add_to
from accel_core.processes.watch.diagnosis import ENDED, FAILED, Broken
from accel_core.processes.watch.failure_notices import Notices, timed_out
from accel_core.processes.watch.monitor import Patrol
from accel_core.processes.watch.rank_status import Presence
from accel_core.processes.watch.stack_location import Process
from accel_core.processes.watch.status_store import Board

if TYPE_CHECKING:
    from torch.distributed import Store

    from accel_core.processes.mismatch_report import Description

MEETING = timedelta(seconds=3)
"""The time in which rank 0 is to announce its process: it makes its World now, as a rule."""

LINGER = timedelta(seconds=2)
"""The time that rank 0, which may host the store, waits for ranks that still ask why the run ends."""

PATIENCE = 4.0
"""Seconds in which a rank whose connection broke looks for the reason, before it raises without one."""

AGAIN = "The ranks did not come together, as an earlier error of this rank says. Nothing can communicate any more: let it end."
"""Added to the errors that follow where a script goes on after a verdict."""

GRACE = 5.0
"""Seconds after a verdict in which what waits has to raise, before the process is ended from here."""


class Watch:
    """The watch of one rank over its world: a thread that sleeps, with a connection of its own to the store.

    A rank that is in no collective is never ended from here, for it may be writing what must not be
    lost: its next collective raises.

    Args:
        store, rank, size: of the world.
        break_off: makes the collectives raise that wait in this process, and all later ones.
        ended: whether the process group is there no more.
        compare: whether every collective is compared across the ranks before it runs: `checks`.
        spins: whether a thread that waits for its device uses a core meanwhile.
        hosted: whether the store is the launcher's; else it goes with rank 0.

    Attributes:
        verdict: why the ranks will not come together; empty as long as they may.
        inside: by thread, the collective that it is in; None once it has left its last one.
        raised: whether a collective of this rank has raised with what was found out.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        break_off: Callable[[], None],
        ended: Callable[[], bool],
        compare: bool,
        spins: bool = False,
        hosted: bool = False,
    ) -> None:
        self.verdict = ""
        self._rank, self._size, self._break_off = rank, size, break_off
        self._presence = Presence(rank, spins)
        self.inside = self._presence.inside
        self.raised = False
        self._told = False
        # A store may outlive a group, and the next one of the same ranks must not find what was said in the last.
        number = store.add(f"accel/watches/{rank}", 1)
        mine = _connected_anew(store)
        self._board, notices = Board(dist.PrefixStore(f"accel/watch/{number}", mine), rank), Notices(mine, rank, size)
        self._board.introduce(Process.current())
        host = None if hosted else self._board.host(MEETING)
        self._patrol = Patrol(self._board, notices, self._presence, rank, size, host, ended, self._conclude)
        self.checks = None
        if compare:
            checked = dist.PrefixStore(f"accel/checks/{number}", _connected_anew(store))
            self.checks = Checks(checked, rank, size, lambda: self.verdict)
        self._thread = threading.Thread(target=self._patrol.run, name=f"accel watch of rank {rank}", daemon=True)
        self._thread.start()

    def collective(
        self, name: str, members: tuple[int, ...] | None = None, details: Description | None = None
    ) -> Collective:
        """A block in which this thread takes part in a collective: see `Collective`."""
        return Collective(self, name, members, details)

    def explain(self, error: BaseException) -> None:
        """Adds to the error of a broken connection why it broke; takes `PATIENCE` seconds at most. No collective."""
        self._told = True
        entry = self.inside.get(threading.get_ident())
        name = "a collective" if entry is None else entry.name
        if self.raised:
            add_to(error, AGAIN)
            return
        text = self.verdict or self._patrol.ask(Broken(name, timed_out(error)), PATIENCE)
        self.raised = bool(text)
        add_to(error, text)
        with contextlib.suppress(dist.DistError):
            self._board.acknowledge()

    def leave(self, failed: bool) -> None:
        """Says that this rank takes part no more, from now on."""
        self._presence.left = FAILED if failed else ENDED
        self._told = True  # by what comes of leaving
        with contextlib.suppress(dist.DistError):  # the store has gone before, and nobody is left who would ask
            self._board.post(self._presence.report())

    def stop(self) -> None:
        """Ends the thread. The last word of this rank stays on the board, as long as rank 0 keeps the store."""
        if self._rank == 0 and (self.verdict or self._presence.left == FAILED):
            with contextlib.suppress(dist.DistError):
                self._board.linger(self._size, LINGER)
        self._patrol.stop()
        self._thread.join(PATIENCE)

    def _conclude(self, text: str) -> None:
        """Ends what waits in this process. Runs in the thread of the Watch."""
        self.verdict = text
        self._break_off()
        deadline = time.monotonic() + GRACE
        while self._in_a_collective() and time.monotonic() < deadline:
            time.sleep(0.05)
        if not self._told:
            _say(f"[rank {self._rank}] {text}")
        if not self._told and self._in_a_collective():
            _say(f"[rank {self._rank}] What waits cannot be interrupted: the process ends here.")
            os._exit(1)

    def _in_a_collective(self) -> bool:
        return bool(self._presence.report().calls)


def _connected_anew(store: Store) -> Store:
    """A clone of the store with its own connection: a client serves one request at a time, and some wait long."""
    client: Any = store
    clone: Store = client.clone()  # torch's stubs do not know it
    return clone


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)  # noqa: T201  (the program is in no state to be told otherwise)
