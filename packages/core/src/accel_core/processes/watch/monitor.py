"""The thread of the Watch: it looks, asks, answers, and judges.

It wakes once a second and sends one message to the store, unless somebody waits. It may not wait
itself: the process that hosts the store, which may have been stopped, is looked for first.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch.distributed as dist

from accel_core.processes.watch.diagnosis import (
    ENDED,
    FAILED,
    ROOTED,
    SILENT,
    Absent,
    Broken,
    Missing,
    Report,
    broken_text,
    ended,
    judged,
    lost,
    stopped,
    table,
    verdict,
)
from accel_core.processes.watch.failure_notices import broken_connection_in

if TYPE_CHECKING:
    from accel_core.processes.watch.failure_notices import Notices
    from accel_core.processes.watch.rank_status import Presence
    from accel_core.processes.watch.stack_location import Process, State
    from accel_core.processes.watch.status_store import Board

PERIOD = 1.0
"""Seconds between two looks."""

ALERT = 0.5
"""Seconds between two looks while this rank waits in a collective."""

HASTE = 0.25
"""Seconds between two looks while a thread of this process waits to hear why its connection broke."""

ENOUGH = 6
"""Looks after which a rank that is known to be missing is not kept back for the lines of the others."""

CERTAIN, LIKELY = 2, 3
"""In how many reports of a rank it has to wait in vain, in the same collective, before that is believed: it may be about to
leave that one. So often if another one has gone for certain, and if only where all stand tells so."""

INQUIRY = 3.0
"""Seconds in which the others are to say where they stand, once a connection broke."""

REMINDER = 60.0
"""Seconds of waiting after which a line says who waits for whom; then after twice as many, and so on."""

logger = logging.getLogger("accel_core.processes.watch")


class Patrol:
    """The work of the Watch's thread on one rank.

    `host` is the process of rank 0, if it hosts the store; `over` says whether the process group is
    there no more; `conclude` is called once, with the verdict, when the ranks will not come
    together.
    """

    def __init__(
        self,
        board: Board,
        notices: Notices,
        presence: Presence,
        rank: int,
        size: int,
        host: Process | None,
        over: Callable[[], bool],
        conclude: Callable[[str], None],
    ) -> None:
        self._board, self._notices, self._presence = board, notices, presence
        self._rank, self._others = rank, [each for each in range(size) if each != rank]
        self._over, self._conclude = over, conclude
        self._heard = 0  # how often somebody had asked at the last look
        self._seen: dict[
            int, tuple[int, float]
        ] = {}  # by rank: the number of its last report, and since when it is that
        self._fresh: set[int] = set()  # the ranks that have reported since this one began to wait
        self._processes: dict[int, Process] = {}
        self._suspicion: tuple[object, list[int], int] = None, [], 0  # what, in which reports, and how often seen
        self._waited, self._answering = 0.0, False  # at the last look
        self._looks = 0  # since this rank began to wait
        self._remind_after = REMINDER
        self._question: tuple[Broken, float] | None = None  # what broke, if a thread wants to know why, and since when
        self._host = host
        self._store_is_lost = False
        self._stopped_since: float | None = None
        self._answer = ""
        self._wake, self._answered, self._stop = threading.Event(), threading.Event(), threading.Event()

    def run(self) -> None:
        """Looks again and again, until `stop` or until there is a verdict."""
        while not self._stop.is_set():
            self._wake.wait(HASTE if self._question else ALERT if self._looks else PERIOD)
            self._wake.clear()
            if self._over():
                self.stop()
            if not self._stop.is_set():
                self._look_safely()

    def _look_safely(self) -> None:
        try:
            self._look()
        except Exception:
            # A look that outlasts the world, for a message took long, sees the interpreter being taken apart.
            if not self._stop.is_set():
                raise

    def stop(self) -> None:
        """Ends `run`, soon."""
        self._stop.set()
        self._wake.set()
        self._answered.set()

    def ask(self, broken: Broken, patience: float) -> str:
        """Why the connections of this rank broke, for the user; empty if nothing is found out in `patience` seconds."""
        if self._stop.is_set():
            return self._answer
        self._answered.clear()
        self._question = broken, time.monotonic()
        self._wake.set()
        self._answered.wait(patience)
        self._question = None
        return self._answer

    def _look(self) -> None:
        """One look, while the store is there. It ends with rank 0 as a rule, which hosts it, be that a failure or not."""
        state = self._host.state() if self._host is not None and self._rank != 0 else "unknown"
        if self._store_is_lost or state in ("gone", "stopped"):
            self._without_store(state)
            return
        self._stopped_since = None
        try:
            self._look_around()
        except dist.DistError:
            # It does not come back, and each further message would only be complained of. What has become of rank 0 is for
            # the next look: its sockets close before its process is seen to be gone.
            self._store_is_lost = True

    def _look_around(self) -> None:
        report = self._presence.report()
        waits = bool(self._question or report.waiting)
        if not threading.main_thread().is_alive() and not report.left and not self._presence.goes_on():
            self._last_words(report)
            return
        count, judged = self._board.ask(waits)
        if judged:
            self._end(self._board.verdict())
            return
        if waits or count != self._heard:
            self._board.post(replace(report, neighbours=self._neighbours()))
        self._heard = count
        waited = max((call.seconds for call in report.waiting), default=0.0)
        if not waits or waited < self._waited or bool(self._question) != self._answering:
            self._forget()  # what was heard while this rank waited for something else
        self._waited, self._answering = waited, bool(self._question)
        if waits:
            self._looks += 1
            self._call_the_roll(report)

    def _forget(self) -> None:
        self._seen.clear()
        self._fresh.clear()
        self._suspicion = None, [], 0
        self._looks = 0
        self._remind_after = REMINDER

    def _call_the_roll(self, report: Report) -> None:
        others, absent = self._reports()
        if self._question:
            self._find_reason(report, others, absent)
        elif self._board.lead():
            self._judge(report, others, absent)

    def _reports(self) -> tuple[dict[int, Report], dict[int, Absent]]:
        """The others' reports since this rank began to wait, or their last ones; and the silent ranks."""
        now = self._presence.seconds
        reports: dict[int, Report] = {}
        absent: dict[int, Absent] = {}
        for rank in self._others:
            report = self._board.report(rank)
            silence = self._silence(rank, report.number if report else 0, now)
            if report is not None and (rank in self._fresh or report.left):
                reports[rank] = report
            if not (report and report.left) and (rank not in self._fresh or silence > 2 * PERIOD):
                process = self._process(rank)
                # One that has not introduced itself makes its Accelerator later, or none: nothing is known of it.
                state = process.state() if process else "running"
                absent[rank] = Absent(silence, state, str(process or "its process"))
        seen = {rank: state for report in reports.values() for rank, state in report.neighbours.items()}
        return reports, {
            rank: each._replace(state=seen.get(rank, "unknown")) if each.state == "unknown" else each
            for rank, each in absent.items()
        }

    def _silence(self, rank: int, number: int, now: float) -> float:
        """For how many seconds a rank has not reported. What it said before anybody asked does not count."""
        known, since = self._seen.setdefault(rank, (number, now))
        if number == known:
            return now - since
        self._seen[rank] = number, now
        self._fresh.add(rank)
        return 0.0

    def _neighbours(self) -> dict[int, State]:
        """The states of the other processes on this machine, for those who cannot look at it."""
        states = {rank: process.state() for rank in self._others if (process := self._process(rank))}
        return {rank: state for rank, state in states.items() if state != "unknown"}

    def _process(self, rank: int) -> Process | None:
        found = self._processes.get(rank) or self._board.process(rank)
        if found is not None:
            self._processes[rank] = found
        return found

    def _judge(self, report: Report, others: dict[int, Report], absent: dict[int, Absent]) -> None:
        waiting, found = judged(report, others, absent)
        ranks = [each.rank for each in found]
        everyone = {**others, self._rank: report}
        heard = all(rank in everyone or rank in ranks for rank in self._others) or self._looks > ENOUGH
        seen = self._times_seen(waiting, found, everyone)
        if found and heard and seen >= (CERTAIN if any(each.certain for each in found) else LIKELY):
            del everyone[waiting.rank]
            self._end(self._board.judge(self._notices.read() or verdict(waiting, everyone, found)))
        if self._waited >= self._remind_after and not found:
            self._remind_after *= 2
            logger.warning(
                "Rank %d has waited for %.0f s. The ranks:\n%s", self._rank, self._waited, table(report, others, {})
            )

    def _times_seen(self, waiting: Report, found: list[Missing], everyone: dict[int, Report]) -> int:
        """In how many reports running of the ranks concerned this has been found, with none of them a step further."""
        ranks = [waiting.rank, *(each.rank for each in found if not each.certain)]
        calls = [(rank, call.meeting, call.since) for rank in ranks for call in everyone[rank].waiting]
        what = calls, [(each.rank, each.certain) for each in found]
        numbers = [everyone[rank].number for rank in ranks]
        before, last, times = self._suspicion
        if what != before or not found:
            self._suspicion = what, numbers, int(bool(found))
        elif all(now > then for now, then in zip(numbers, last, strict=True)):
            self._suspicion = before, numbers, times + 1
        return self._suspicion[2]

    def _find_reason(self, report: Report, others: dict[int, Report], absent: dict[int, Absent]) -> None:
        question = self._question
        if question is None:
            return  # who asked has lost patience meanwhile
        broken, since = question
        told = self._board.verdict() or self._notices.read()  # a verdict may have come since this look began
        gone = {rank: reason for rank, each in absent.items() if (reason := lost(each))}
        if told or all(rank in others or rank in gone for rank in self._others):
            self._reply(told or broken_text(broken, report, others, gone))
        elif time.monotonic() - since > INQUIRY:
            silent = {rank: f"{each.process} does not answer" for rank, each in absent.items()}
            self._reply(broken_text(broken, report, others, silent | gone))

    def _without_store(self, state: State) -> None:
        """Judges alone: a message to a process that was stopped would not come back.

        A lost store says nothing of rank 0, unless its process is gone: the launcher may have
        hosted it.
        """
        report = self._presence.report()
        self._stopped_since = self._stopped_since or self._presence.seconds
        if state == "stopped" and self._presence.seconds - self._stopped_since < SILENT:
            return
        name = str(self._host or "the process that hosts the store at which the ranks have met")
        reason = stopped(name) if state == "stopped" else ended(name)
        calls = [call for call in report.waiting if call.involves(0) and not (state == "gone" and call.name in ROOTED)]
        if state in ("gone", "stopped") and calls:
            self._end(verdict(report, {}, [Missing(0, reason, True)]))
        elif (question := self._question) is not None:
            broken, since = question
            if state != "running" or time.monotonic() - since > INQUIRY:
                self._reply(broken_text(broken, report, {}, {} if state == "running" else {0: reason}))

    def _last_words(self, report: Report) -> None:
        """The main thread has ended, but other threads of the user's keep the process: the exit is not heard of yet."""
        error = getattr(sys, "last_value", None)
        if error is not None and broken_connection_in(error) is None:
            self._notices.post(error)
        self._presence.left = ENDED if error is None else FAILED
        self._board.post(replace(report, left=self._presence.left))

    def _reply(self, text: str) -> None:
        self._answer = text
        self._answered.set()

    def _end(self, text: str) -> None:
        if not self._store_is_lost:
            with contextlib.suppress(dist.DistError):  # what is said here matters more than that it was heard
                self._board.acknowledge()
        self._stop.set()
        self._reply(text)
        self._conclude(text)
