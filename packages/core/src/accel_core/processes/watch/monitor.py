"""The Watch of a rank: a thread that looks, asks, answers and judges, and its interface."""

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

from accel_core.processes.failure_output import broken_connection_in
from accel_core.processes.watch import diagnosis
from accel_core.processes.watch.checks import Checks
from accel_core.processes.watch.collective_scope import Collective
from accel_core.processes.watch.diagnosis import ENDED, FAILED, LOSSES, ROOTED, SILENT, Absent, Report, broken_text
from accel_core.processes.watch.rank_status import RankStatus
from accel_core.processes.watch.stack_location import Process
from accel_core.processes.watch.status_store import StatusStore

if TYPE_CHECKING:
    from accel_core.processes.mismatch_report import Description
    from accel_core.processes.watch.device_mark import DeviceMark
    from accel_core.processes.watch.stack_location import State

PERIOD, ALERT = 1.0, 0.5  # seconds between two looks: as a rule; while this rank waits, or asks why a connection broke
# In how many reports of a rank it has to wait in vain, in the same collective, before that is believed: it may be about to
# leave that one. Twice as often if the lines of others are still to come.
SIGHTINGS = 3
INQUIRY, PATIENCE = 3.0, 4.0  # seconds once a connection broke: for the others to say where they stand; for an answer
MEETING = timedelta(seconds=3)  # for rank 0 to announce its process: it makes its World now, as a rule
LINGER = timedelta(seconds=2)  # that rank 0, which may host the store, waits for ranks that still ask why the run ends
GRACE = 5.0  # seconds after a verdict in which what waits has to raise, before the process is ended from here

# Added to the errors that follow where a script goes on after a verdict.
AGAIN = "The ranks did not come together, as an earlier error of this rank says. Nothing can communicate any more: let it end."


class Watch:
    """The watch of one rank over its world: a sleeping thread, with a connection to the store.

    A rank in no collective may be writing, and is never ended here: its next collective raises.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        break_off: Callable[[], None],  # makes the collectives raise that wait in this process, and all later ones
        over: Callable[[], bool],  # whether the process group is there no more
        compare: bool,  # every collective across the ranks before it runs: `checks`
        mark: DeviceMark | None = None,  # of an accelerator
        hosted: bool = False,  # by the launcher; else the store goes with rank 0
    ) -> None:
        self.verdict = ""  # why the ranks will not come together; empty as long as they may
        self.raised = False  # whether a collective of this rank has raised with what was found out
        self._told = False  # whether the user knows what happened without a word of the thread
        self._rank, self._others = rank, [each for each in range(size) if each != rank]
        self._break_off, self._over = break_off, over
        self._status = RankStatus(rank, mark)
        self.inside = self._status.inside
        # A store may outlive a group, and the next one of the same ranks must not find what was said in the last.
        number = store.add(f"accel/watches/{rank}", 1)
        self._board = StatusStore(dist.PrefixStore(f"accel/watch/{number}", _connected_anew(store)), rank)
        self._board.introduce(Process.current())
        self._asks_rank_0 = not hosted and rank != 0  # which hosts the store
        self._host = self._board.process(0, MEETING) if self._asks_rank_0 else None
        self._processes: dict[int, Process] = {}
        self._asked = 0  # how often somebody had asked at the last look
        self._wait: object = None  # what this rank waited for at the last look
        self._forget()
        # What broke, whether by a timeout, and when a thread of the user's began to ask why.
        self._question: tuple[str, bool, float] | None = None
        self._answer = ""
        self._store_is_lost = False
        self._stopped_since: float | None = None  # the host of the store
        self._stopped, self._wake, self._answered = False, threading.Event(), threading.Event()
        self.checks = None
        if compare:
            checked = dist.PrefixStore(f"accel/checks/{number}", _connected_anew(store))
            self.checks = Checks(checked, rank, size, lambda: self.verdict)
        self._thread = threading.Thread(target=self._run, name=f"accel watch of rank {rank}", daemon=True)

    def start(self) -> Watch:
        """Begins to look."""
        self._thread.start()
        return self

    def collective(
        self, name: str, members: tuple[int, ...] | None = None, details: Description | None = None
    ) -> Collective:
        """A block in which this thread takes part in a collective: see `Collective`."""
        return Collective(self, name, members, details)

    def explain(self, error: BaseException) -> str:
        """Why a connection broke, if that is found out in `PATIENCE` seconds. No collective."""
        self._told = True
        if self.raised:
            return AGAIN
        entry = self.inside.get(threading.get_ident())
        timed_out = any(word in str(error).lower() for word in ("timed out", "timeout"))
        text = self.verdict or self._ask("a collective" if entry is None else entry.name, timed_out)
        self.raised = bool(text)
        self._board.acknowledge()
        return text

    def fail(self, error: BaseException) -> None:
        """Tells the others which error ends this rank."""
        self._board.post_failure(error)

    def leave(self, failed: bool) -> None:
        """Says that this rank takes part no more, from now on."""
        self._status.left = FAILED if failed else ENDED
        self._told = True  # by what comes of leaving
        with contextlib.suppress(dist.DistError):  # the store has gone before, and nobody is left who would ask
            self._board.post(self._status.report())

    def stop(self, alone: bool = False) -> None:
        """Ends the thread; `alone`: without the others. Its last word lasts as long as rank 0."""
        failed = self.verdict or self._status.left == FAILED or (alone and self._board.failures())
        if self._rank == 0 and failed:
            with contextlib.suppress(dist.DistError):
                self._board.linger(len(self._others) + 1, LINGER)
        self._end_looking()
        if self._thread.is_alive():
            self._thread.join(PATIENCE)

    def _ask(self, name: str, timed_out: bool) -> str:
        """The answer to a user whose connections broke; empty if nothing is found out."""
        if not self._stopped:
            self._answered.clear()
            self._question = name, timed_out, time.monotonic()
            self._wake.set()
            self._answered.wait(PATIENCE)
            self._question = None
        return self._answer

    def _end_looking(self) -> None:
        self._stopped = True
        self._wake.set()
        self._answered.set()

    def _run(self) -> None:
        while not self._stopped:
            self._wake.wait(ALERT if self._wait or self._question else PERIOD)
            self._wake.clear()
            if self._over():
                self._end_looking()
            try:
                if not self._stopped:
                    self._look()
            except Exception:
                # A look that outlasts the world, for a message took long, sees the interpreter being taken apart.
                if not self._stopped:
                    raise

    def _look(self) -> None:
        """Looks once, while there is a store, which ends with its host, rank 0, failed or not."""
        report = self._status.report()
        state = "unknown" if self._host is None else self._host.state()
        if self._store_is_lost or state in ("gone", "stopped"):
            self._look_alone(report, state)
            return
        self._stopped_since = None
        try:
            self._look_around(report)
        except dist.DistError:
            # It does not come back, and each further message would only be complained of. What has become of rank 0 is for
            # the next look: its sockets close before its process is seen to be gone.
            self._store_is_lost = True

    def _look_around(self, report: Report) -> None:
        if self._asks_rank_0:  # it may have announced itself later, for its machine stood still
            self._host = self._host or self._process(0)
        if not threading.main_thread().is_alive() and not report.left and not self._status.goes_on():
            self._last_words(report)
            return
        question = self._question
        waits = bool(question or report.waiting)
        asked, found_out = self._board.ask(waits)
        if found_out:
            self._end(self._board.verdict())
            return
        if waits or asked != self._asked:
            running = [rank for rank in self._others if (each := self._process(rank)) and each.state() == "running"]
            report = report._replace(running=tuple(running), collective=self._status.collective())
            self._board.post(report)
        wait = (question, min((call.since for call in report.waiting), default=None)) if waits else None
        if wait != self._wait:
            self._forget()
        self._asked, self._wait = asked, wait
        if question:
            self._find_reason(*question, *self._reports(report))
        elif waits and self._board.lead():
            self._judge(*self._reports(report))

    def _forget(self) -> None:
        """Drops what was heard while this rank waited for something else."""
        # By rank: the number of its last report, since when it is that, and whether it is from while this rank waits.
        self._heard: dict[int, tuple[int, float, bool]] = {}
        self._suspicion: tuple[object, list[int], int] = None, [], 0  # what, in which reports, and how often seen

    def _reports(self, mine: Report) -> tuple[dict[int, Report], dict[int, Absent]]:
        """Reports since this rank's wait, its own first, those of who has left; silent ranks."""
        reports, absent = {self._rank: mine}, {}
        for rank in self._others:
            report = self._board.report(rank)
            number, left = (report.number, report.left) if report else (0, "")
            known, since, fresh = self._heard.get(rank, (number, self._status.seconds, False))
            if number != known:
                since, fresh = self._status.seconds, True
            self._heard[rank] = number, since, fresh
            silence = self._status.seconds - since
            if report is not None and (fresh or left):
                reports[rank] = report
            if not left and (not fresh or silence > 2 * PERIOD):
                process = self._process(rank)
                # One that has not introduced itself makes its Accelerator later, or none: nothing is known of it.
                absent[rank] = Absent(silence, process.state() if process else "running", str(process or "its process"))
        # A rank that holds the GIL for long does not answer; another one on its machine sees that it runs.
        seen = {
            each
            for rank, report in reports.items()
            if rank not in absent and not report.left
            for each in report.running
        }
        return reports, {
            rank: each._replace(state="running") if each.state == "unknown" and rank in seen else each
            for rank, each in absent.items()
        }

    def _process(self, rank: int) -> Process | None:
        found = self._processes.get(rank) or self._board.process(rank)
        if found is not None:
            self._processes[rank] = found
        return found

    def _judge(self, reports: dict[int, Report], absent: dict[int, Absent]) -> None:
        waiting, found = diagnosis.judged(reports, absent)
        if waiting is None:
            self._suspicion = None, [], 0
            return
        ranks = [waiting.rank, *(rank for rank, reason in found.items() if not reason)]
        calls = [(rank, call) for rank in ranks for call in reports[rank].waiting]
        waits = [(rank, call.meeting, call.since, call.on_device and call.line) for rank, call in calls]
        what, numbers = (waits, {rank: bool(found[rank]) for rank in found}), [reports[rank].number for rank in ranks]
        before, last, times = self._suspicion
        if what != before:
            self._suspicion = what, numbers, 1
        elif all(now > then for now, then in zip(numbers, last, strict=True)):  # none of them is a step further
            self._suspicion = what, numbers, times + 1
        heard = all(rank in reports or rank in found for rank in self._others)
        if self._suspicion[2] >= (SIGHTINGS if heard else 2 * SIGHTINGS):
            self._end(self._board.judge(self._board.failures() or diagnosis.verdict(waiting, reports, found)))

    def _find_reason(
        self, name: str, timed_out: bool, since: float, reports: dict[int, Report], absent: dict[int, Absent]
    ) -> None:
        told = self._board.verdict() or self._board.failures()  # a verdict may have come since this look began
        gone = {rank: each.lost for rank, each in absent.items() if each.lost}
        late = time.monotonic() - since > INQUIRY
        if told or late or all(rank in reports or rank in gone for rank in self._others):
            silent = {rank: f"{each.process} does not answer" for rank, each in absent.items() if late}
            self._reply(told or broken_text(self._rank, name, timed_out, reports, silent | gone))

    def _look_alone(self, report: Report, state: State) -> None:
        """Looks without the store: a stopped host is silent; a lost store tells nothing of it."""
        self._stopped_since = self._stopped_since or self._status.seconds
        if state == "stopped" and self._status.seconds - self._stopped_since < SILENT:
            return
        host = str(self._host or "the process that hosts the store at which the ranks have met")
        reason = {0: LOSSES.get(state, LOSSES["gone"]).format(host)} if state != "running" else {}
        calls = [call for call in report.waiting if call.involves(0) and not (state == "gone" and call.name in ROOTED)]
        if state in ("gone", "stopped") and calls:
            self._end(diagnosis.verdict(report, {self._rank: report}, reason))
        elif question := self._question:
            name, timed_out, since = question
            if state != "running" or time.monotonic() - since > INQUIRY:
                self._reply(broken_text(self._rank, name, timed_out, {self._rank: report}, reason))

    def _last_words(self, report: Report) -> None:
        """The main thread has ended, but the user's threads keep the process: reports its end."""
        error = getattr(sys, "last_value", None)
        if error is not None and broken_connection_in(error) is None:
            self.fail(error)
        self._status.left = ENDED if error is None else FAILED
        self._board.post(report._replace(left=self._status.left))

    def _reply(self, text: str) -> None:
        self._answer = text
        self._answered.set()

    def _end(self, text: str) -> None:
        if not self._store_is_lost:
            self._board.acknowledge()
        self._stopped = True
        self._reply(text)
        self._conclude(text)

    def _conclude(self, text: str) -> None:
        """Ends what waits in this process."""
        self.verdict = text
        self._break_off()
        deadline = time.monotonic() + GRACE
        while self._status.report().calls and time.monotonic() < deadline:
            time.sleep(0.05)
        if not self._told:
            _say(f"[rank {self._rank}] {text}")
        if not self._told and self._status.report().calls:
            _say(f"[rank {self._rank}] What waits cannot be interrupted: the process ends here.")
            os._exit(1)


def _connected_anew(store: dist.Store) -> dist.Store:
    """A clone of the store with its own connection: a client serves one request at a time."""
    client: Any = store
    clone: dist.Store = client.clone()  # torch's stubs do not know it
    return clone


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)  # noqa: T201  (the program is in no state to be told otherwise)
