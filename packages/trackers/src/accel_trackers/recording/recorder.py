"""One tracker in a thread of its own: neither its calls nor its failures reach the training.

A job that raises is the last: the tracker is switched off, and closed if it can be. One that takes
long, as while a server restarts, holds up only this thread: what is logged meanwhile waits, up to
`most_pending` records. What takes too long to start or to finish is switched off, and its thread, a
daemon, left to itself. What is switched off gets nothing more, and what was waiting for it is
dropped. Failures are told where the training runs, by whoever asks for `untold`: an exception or a
warning in another thread would be seen by nobody.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

from accel_core import GeneralTracker, RecordRefusedError, Tracker
from accel_trackers.recording.record import LeftOut, Record
from accel_trackers.recording.shutdown import left
from accel_trackers.recording.values import describe, said

if TYPE_CHECKING:
    import torch

    from accel_core import Table, TrackedRun, TrackingKwargs

_FLUSH_AFTER = 5.0  # seconds after a record at which the tracker flushes, if it has not done so since

_KINDS = {"log": "values", "log_histograms": "histograms", "log_images": "images", "log_table": "tables"}

logger = logging.getLogger(__name__)


class Recorder:
    """A tracker, and the thread and queue in which it is told what to record."""

    def __init__(self, tracker: Tracker | GeneralTracker, name: str, rules: TrackingKwargs) -> None:
        self.tracker = tracker
        self.name = name
        self.state: Mapping[str, Any] = {}
        self.was_started = self._is_open = False
        self._is_older = isinstance(tracker, GeneralTracker)
        self._told: Tracker = _Older(tracker) if isinstance(tracker, GeneralTracker) else tracker
        self.failure: str | None = None
        self.cause: BaseException | None = None
        self._rules = rules
        self._untold: list[str] = []
        self._left_out: set[str] = set()
        self._jobs: SimpleQueue[tuple[str, Callable[[], None], int] | None] = SimpleQueue()
        self._changed = threading.Condition()  # re-entrant: a signal handler may log
        self._handed = self._done = 0  # by weight
        self._is_ending = self._is_stuck = self._is_abandoned = False
        self._doing = ""
        self._since: float | None = None  # when the present job began, None while its time does not count
        self._told_of: float | None = None  # when the last job began that was told to take long
        self._flush_at: float | None = None
        self._thread = threading.Thread(target=self._work, name=f"accel tracker {name}", daemon=True)
        self.begin = self._thread.start  # jobs may have been put before

    def start(self, run: TrackedRun) -> None:
        """Has the run opened, and its configuration stored."""
        self._do("start()", partial(self._start, run))

    def put(self, method: str, arguments: tuple[Any, ...], weight: int, options: Mapping[str, Any]) -> None:
        """Has a method of the tracker called; `log` gets a `Record`. Last argument: the step."""
        work = partial(self._log, *arguments) if method == "log" else partial(self._call, method, arguments)
        self._do(f"{method}()", partial(work, options), weight)

    def flush(self) -> None:
        """Has what was recorded made readable, and the state brought up to date."""
        self._do("flush()", self._flush)
        self._do("state()", self._remember)

    def finish(self, failed: bool) -> None:
        """Has the run closed, once everything is recorded; does not wait for it."""
        if not self._is_ending:
            self._do("finish()", partial(self._finish, failed), last=True)

    @property
    def pending(self) -> int:
        """The total weight of the jobs that were handed over and are not done."""
        return self._handed - self._done

    def wait(self, timeout: float) -> bool:
        """Waits until all jobs handed over are done, or the tracker is off; False on timeout."""
        target = self._handed
        with self._changed:
            return self._changed.wait_for(lambda: self._done >= target or self.failure is not None, timeout)

    def join(self, timeout: float) -> None:
        """Waits for the end of the thread, which closes a failed tracker, unless it is stuck."""
        if not self._is_stuck and self._thread.is_alive():
            self._thread.join(timeout)

    def give_up(self, reason: str, cause: BaseException | None = None) -> None:
        """Switches the tracker off, drops its jobs. Called by another thread, it is stuck."""
        with self._changed:
            if self.failure is not None:
                return
            self.failure, self.cause = reason, cause
            self._is_stuck = threading.current_thread() is not self._thread
            self._say(f"is switched off: {reason}.")  # before anybody is woken
            dropped, self._jobs = self._jobs, SimpleQueue()
            for each in (dropped, self._jobs):
                each.put(None)  # for a thread that waits for the next job, in whichever of the two
            self._changed.notify_all()

    def catch_up(self, deadline: float) -> bool:
        """Waits as `wait`, but for any one job no longer than `stall_timeout`, however often it is asked."""
        while not self.wait(min(left(deadline), self._patience())):
            if not min(left(deadline), self._patience()):
                return False
        return True

    def stall(self) -> str | None:
        """A message, once for a job, if that takes long."""
        since = self._since
        if since in {None, self._told_of} or self._patience() or self.failure is not None:
            return None
        self._told_of = since
        return (
            f"The tracker {self.name!r} is busy: {self._doing} has taken more than {self._rules.stall_timeout:g} s, and {self.pending} "
            f"records wait. They are recorded when it returns; from TrackingKwargs(most_pending={self._rules.most_pending}) on, the "
            f"tracker is switched off."
        )

    def _patience(self) -> float:
        """The seconds until the present job has taken `stall_timeout`; 0.0 after that."""
        return left((self._since or time.monotonic()) + self._rules.stall_timeout)

    def untold(self) -> list[str]:
        """The messages since the last call."""
        with self._changed:
            told, self._untold = self._untold, []
        return told

    def abandon(self) -> None:
        """Has messages logged, also later ones: nobody is left who would ask for them."""
        self._is_abandoned = True
        for text in self.untold():
            logger.warning("%s", text)

    def _do(self, doing: str, job: Callable[[], None], weight: int = 1, *, last: bool = False) -> None:
        """Hands a job over, unless the tracker is switched off; never waits.

        `doing` stands in messages, `weight` is how many records the job counts as while it waits.
        What is put after the `last` one is left out.
        """
        with self._changed:  # several threads may log
            if self._is_ending and self.failure is None:  # however long the end takes
                self._leave_out("what is logged while the run ends, or later.")
            elif self.pending >= self._rules.most_pending:  # which does nothing if it is switched off
                self.give_up(f"it is {self._rules.most_pending} records behind")
            elif self.failure is None:
                self._is_ending = last
                self._handed += weight
                self._jobs.put((doing, job, weight))
                if last:
                    self._jobs.put(None)

    def _work(self) -> None:
        while (item := self._next()) is not None and self.failure is None:
            self._doing, job, weight = item
            self._since = time.monotonic()
            try:
                job()
            except BaseException as error:  # noqa: BLE001  (a service may call sys.exit)
                self.give_up(f"{self._doing} raised {said(error).rstrip('.')}", error)
            self._since = None
            if weight and self._flush_at is None:
                self._flush_at = time.monotonic() + _FLUSH_AFTER
            with self._changed:
                self._done += weight
                self._changed.notify_all()
        if self.failure is not None:
            try:
                self._close()
            except BaseException as error:  # noqa: BLE001
                self._say(f"could not be closed either, and may have lost records: {said(error)}")

    def _next(self) -> tuple[str, Callable[[], None], int] | None:
        """The next job, for which it waits until the tracker should flush."""
        wait = None if self._flush_at is None else max(self._flush_at - time.monotonic(), 0.0)
        try:
            return self._jobs.get(timeout=wait)
        except Empty:
            self._flush_at = None
            return "flush()", self._flush, 0

    def _leave_out(self, reason: str, kind: str = "") -> None:
        """Notes that something cannot be recorded, once per `kind`, or reason; goes on."""
        if (kind or reason) not in self._left_out:
            self._left_out.add(kind or reason)
            self._say(f"leaves out {reason}")

    def _say(self, text: str) -> None:
        with self._changed:
            self._untold.append(f"The tracker {self.name!r} {text}")
        if self._is_abandoned:
            self.abandon()

    def _start(self, run: TrackedRun) -> None:
        if getattr(self.tracker, "__dict__", {}).setdefault("_accel_run", run.run_id) != run.run_id:
            raise RuntimeError("this object records another run; give each Accelerator a tracker of its own")
        self._is_open = self._is_older  # such a class may open its run when it is built
        try:
            self._told.start(run)
        except BaseException:
            # What it has opened by then would be shown as running for ever.
            self._is_open = self._is_older or self._has_run()
            raise
        self._is_open = self.was_started = True
        self._remember()

    def _has_run(self) -> bool:
        """Whether the service's object for the run is there."""
        try:
            return self.tracker.tracker is not None
        except Exception:  # noqa: BLE001  (whatever a property raises that has nothing to return yet)
            return False

    def _log(self, record: Record, step: int, options: Mapping[str, Any]) -> None:
        self._since = None  # the device may be busy, which is not the tracker's time
        view = record.nested() if self._is_older else record.joined()
        self._since = time.monotonic()
        known: dict[str, object] = {}
        for name, value in view.others.items():
            if not isinstance(value, LeftOut) and self._told.records(value):
                known[name] = value
            else:
                found = (value.reason if isinstance(value, LeftOut) else describe(value)).rstrip(".")
                self._leave_out(f"the value {name!r}: {found}. Log numbers, texts, Histogram(...), or dicts of them.")
        if view.values or known:
            self._call("log", ({**view.values, **known}, step), options)
        if view.histograms:
            self._call("log_histograms", (dict(view.histograms), step), options)

    def _call(self, method: str, arguments: tuple[Any, ...], options: Mapping[str, Any]) -> None:
        kind = _KINDS[method]
        for each in (self.tracker, self._told):
            found = getattr(each, method, None)
            if found is None or getattr(found, "__func__", None) is getattr(Tracker, method):
                self._leave_out(f"{kind}: it has none.")
                return
        try:
            getattr(self._told, method)(*arguments, **options)
        except RecordRefusedError as error:
            self._leave_out(f"{kind} that it cannot hold, and says of the first only: {error}", kind)
        except TypeError as error:
            if not options:  # of which one may be misspelt: that costs the record
                raise
            self._leave_out(f"{kind} with log_kwargs={{{self.name!r}: {dict(options)}}}: {error}")

    def _flush(self) -> None:
        if self._is_open:
            self._told.flush()

    def _remember(self) -> None:
        self.state = json.loads(json.dumps(dict(self._told.state())))  # raises here rather than in `save_state`

    def _finish(self, failed: bool) -> None:
        self._is_open = False  # whatever comes of it, it is not closed again
        self._told.finish(failed)

    def _close(self) -> None:
        """After a failure: the record is not complete, but what is in it should be readable."""
        if self._is_open:
            self._finish(failed=True)


class _Older(Tracker):
    """A `GeneralTracker` as a `Tracker`, without state, start options and histograms."""

    def __init__(self, older: GeneralTracker) -> None:
        self._older: Any = older

    def start(self, run: TrackedRun) -> None:
        self._older.start()
        if run.config:
            self._older.store_init_configuration(dict(run.config))

    def log(self, values: Mapping[str, Any], step: int, **options: Any) -> None:
        """Values are nested as the user gave them."""
        self._older.log(dict(values), step=step, **options)

    def log_images(self, values: Mapping[str, Sequence[torch.Tensor]], step: int, **options: Any) -> None:
        arrays = {name: [image.numpy().copy() for image in several] for name, several in values.items()}
        self._older.log_images(arrays, step, **options)

    def log_table(self, name: str, table: Table, step: int, **options: Any) -> None:
        rows = [list(row) for row in table.rows]
        self._older.log_table(name, list(table.columns), rows, None, step, **options)  # None: a dataframe

    def finish(self, failed: bool) -> None:  # noqa: ARG002
        self._older.finish()
