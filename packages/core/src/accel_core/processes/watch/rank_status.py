"""The status of this process: its threads' collectives, and its training thread's line."""

from __future__ import annotations

import threading
import time
from typing import Any

from accel_core.processes.watch.collective_scope import Entry
from accel_core.processes.watch.diagnosis import Call, Report
from accel_core.processes.watch.stack_location import Position, cpu_seconds, position_of

GAP = 2.0  # seconds: of a longer time between two looks only so much counts, for the process itself had been stopped
IDLE = 0.02  # the part of a core below which a process waits; what gloo receives over a slow network takes more


class RankStatus:
    """The status of a rank. A thread in a collective writes `inside`, one observer the rest."""

    def __init__(self, rank: int, mark: Any = None) -> None:
        # By thread that has taken part in collectives: a new object each time, so that two are told apart.
        self.inside: dict[int, Entry | None] = {}
        self.left = ""  # how this rank has left; empty while it takes part
        self.seconds = 0.0  # for how long the observer has been looking, but for when it was stopped
        self._rank, self._mark = rank, mark  # of an accelerator, for which a thread may wait and use a core
        # The loop runs where the world was made, which is another thread than the first in notebooks.
        self._thread = threading.get_ident()
        self._since: dict[int, tuple[Entry, float]] = {}
        self._cpu = time.process_time()
        self._bystanders: dict[int, float] = {}
        self._number = 0
        self._looked_at = time.monotonic()

    def report(self) -> Report:
        """This rank's present report. Measures durations, which begin at the second report."""
        before, self._looked_at = self._looked_at, time.monotonic()
        passed = min(self._looked_at - before, GAP)
        self.seconds += passed
        now, idle = self.seconds, self._used() < IDLE * passed
        taking_part = tuple(self.inside)
        positions = {thread: found for thread in {self._thread, *taking_part} if (found := position_of(thread))}
        entries = {thread: entry for thread, at in positions.items() if (entry := self._entry(thread, at, idle))}
        self._since = {
            thread: (entry, self._begun(thread, entry, now) if self._waits(positions[thread], idle) else now)
            for thread, entry in entries.items()
        }
        calls = tuple(
            Call(entry.name, now - begun, positions[thread].line, entry.members, begun, entry.inner)
            for thread, (entry, begun) in self._since.items()
        )
        for thread in set(taking_part) - set(positions):
            self.inside.pop(thread, None)  # it has ended
        line = positions[self._thread].line if self._thread in positions else "the end of the thread"
        if self._mark is not None:
            unfinished = self._mark.look(now, line)
            calls += (unfinished,) if unfinished and not any(call.waits for call in calls) else ()
        free = any(not at.joins for thread, at in positions.items() if thread in taking_part and thread not in entries)
        self._number += 1
        return Report(
            self._rank, self._number, line, calls, self.left, free, (), self._mark.windows if self._mark else 0
        )

    def collective(self) -> tuple[Any, ...]:
        """The device's collective, as `DeviceMark.collective` says; empty without a device."""
        return self._mark.collective() if self._mark else ()

    def goes_on(self) -> bool:
        """Whether a thread other than the first takes part in collectives, and has not ended."""
        return any(position_of(thread) for thread in {self._thread, *self.inside} - {threading.main_thread().ident})

    def _used(self) -> float:
        """Seconds of CPU since the last call, but for this thread and threads taking no part."""
        before, self._cpu = self._cpu, time.process_time()
        known, self._bystanders = self._bystanders, {}
        for thread in threading.enumerate():
            if thread.native_id and thread.ident not in self.inside and thread.ident != self._thread:
                self._bystanders[thread.native_id] = cpu_seconds(thread.native_id)
        return self._cpu - before - sum(used - known.get(thread, 0.0) for thread, used in self._bystanders.items())

    def _entry(self, thread: int, position: Position, idle: bool) -> Entry | None:
        """The collective that a thread has marked, else, in the world's thread, one of torch's."""
        marked = self.inside.get(thread)
        if marked is not None or thread != self._thread:
            return marked
        if position.meeting:
            return Entry(position.meeting)
        return Entry("backward()") if position.differentiates and idle else None  # what else would it wait for?

    def _begun(self, thread: int, entry: Entry, now: float) -> float:
        known, begun = self._since.get(thread, (None, now))
        # What is recognised by where the thread stands has no object of its own.
        return begun if known is entry or (known == entry and self.inside.get(thread) is None) else now

    def _waits(self, position: Position, idle: bool) -> bool:
        """Whether a thread in a collective computes nothing; in a backward it may compute."""
        return position.communicates and (idle or (self._mark is not None and not position.differentiates))
