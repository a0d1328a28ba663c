"""A tracker in a thread of its own: neither its calls nor its failures reach the training.

A job that raises is the last: the tracker is switched off, and closed if it can be. One that
takes too long is not waited for: its thread, a daemon, is left to itself. What is switched off gets
nothing more, and what was waiting for it is dropped. Failures are told where the training runs, by
whoever asks for `untold`: an exception or a warning in another thread would be seen by nobody.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

from accel_trackers.recording.values import said

if TYPE_CHECKING:
    from accel_core import TrackingKwargs

Job = Callable[[], None]

FLUSH_AFTER = 5.0
"""Seconds after a record at which the tracker flushes, if it has not done so since."""

MOST_TOLD = 20
"""Of how many things that are left out one is told."""

logger = logging.getLogger(__name__)


class TrackerThread:
    """Runs the jobs of one tracker, one after the other.

    Args:
        name: of the tracker.
        rules: how long a job may take, and how many may wait.
        close: called once in the thread, when a job has failed, whatever it raises then.
        flush: a job that runs some seconds after others.
    """

    def __init__(self, name: str, rules: TrackingKwargs, close: Job, flush: Job) -> None:
        self.name = name
        self.failure: str | None = None
        self.cause: BaseException | None = None
        self._rules = rules
        self._close = close
        self._flush = flush
        self._untold: deque[str] = deque()
        self._left_out: set[str] = set()
        self._jobs: SimpleQueue[tuple[str, Job, int] | None] = SimpleQueue()
        self._changed = threading.Condition()  # re-entrant: a signal handler may log
        self._handed = self._done = 0  # by weight
        self._is_ending = self._is_stuck = self._is_abandoned = False
        self._doing = ""
        self._since: float | None = None
        self._flush_at: float | None = None
        self._thread = threading.Thread(target=self._work, name=f"accel tracker {name}", daemon=True)

    def begin(self) -> None:
        """Starts the thread; jobs may have been put before."""
        self._thread.start()

    @property
    def pending(self) -> int:
        """The total weight of the jobs that were handed over and are not done."""
        return self._handed - self._done

    def put(self, doing: str, job: Job, weight: int = 1, *, last: bool = False) -> None:
        """Hands a job over, unless the tracker is switched off; never waits.

        Args:
            doing: what it does, as it stands in messages.
            job: called without arguments.
            weight: how many records it counts as, where they wait.
            last: whether the tracker ends with it; what is put after it is left out.
        """
        with self._changed:  # several threads may log
            is_late, self._is_ending = self._is_ending, self._is_ending or last
            if self.failure is not None:
                return
            if is_late:  # however long the end takes
                self.leave_out("what is logged while the run ends, or later.", kind="late")
            elif self.give_up_if_stalled():
                return
            elif self.pending >= self._rules.most_pending:
                self.give_up(f"it is {self._rules.most_pending} records behind")
            else:
                self._handed += weight
                self._jobs.put((doing, job, weight))
                if last:
                    self._jobs.put(None)

    def wait(self, timeout: float) -> bool:
        """Waits until all jobs handed over are done, or the tracker is off; False on timeout."""
        target = self._handed
        with self._changed:
            return self._changed.wait_for(lambda: self._done >= target or self.failure is not None, timeout)

    def join(self, timeout: float) -> None:
        """Waits for the end of the thread, which closes a failed tracker, unless it is stuck."""
        if not self._is_stuck and self._thread.is_alive():
            self._thread.join(timeout)

    @contextmanager
    def excused(self) -> Iterator[None]:
        """Stops the stall timer inside, where a job takes time that is not the tracker's."""
        self._since = None
        try:
            yield
        finally:
            self._since = time.monotonic()

    def leave_out(self, reason: str, kind: str = "") -> None:
        """Notes that something cannot be recorded, once per `kind`, or reason; goes on."""
        if (kind or reason) not in self._left_out and len(self._left_out) < MOST_TOLD:
            self._left_out.add(kind or reason)
            self._untold.append(f"The tracker {self.name!r} leaves out {reason}")
            if len(self._left_out) == MOST_TOLD:
                more = f"has left out {MOST_TOLD} things; of further ones nothing is said."
                self._untold.append(f"The tracker {self.name!r} {more}")

    def give_up(self, reason: str, cause: BaseException | None = None) -> None:
        """Switches the tracker off, drops its jobs. Called by another thread, it is stuck."""
        with self._changed:
            if self.failure is not None:
                return
            self.failure, self.cause = reason, cause
            self._is_stuck = threading.current_thread() is not self._thread
            self._untold.append(f"The tracker {self.name!r} is switched off: {reason}.")  # before anybody is woken
            dropped, self._jobs = self._jobs, SimpleQueue()
            for each in (dropped, self._jobs):
                each.put(None)  # for a thread that waits for the next job, in whichever of the two
            self._changed.notify_all()

    def give_up_if_stalled(self) -> bool:
        """Switches the tracker off if a job has taken too long; whether it is switched off."""
        since = self._since
        if since is not None and time.monotonic() - since > self._rules.stall_timeout:
            self.give_up(f"{self._doing} has taken more than {self._rules.stall_timeout:g} s")
        return self.failure is not None

    def untold(self) -> list[str]:
        """The messages since the last call."""
        with self._changed:  # several threads may ask
            return [self._untold.popleft() for _ in range(len(self._untold))]

    def abandon(self) -> None:
        """Has messages logged where they arise: nobody is left who would ask for them."""
        self._is_abandoned = True
        if not self._thread.is_alive():
            self._log_untold()

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
                self._flush_at = time.monotonic() + FLUSH_AFTER
            with self._changed:
                self._done += weight
                self._changed.notify_all()
        if self.failure is not None:
            try:
                self._close()
            except BaseException as error:  # noqa: BLE001
                closed = (
                    f"could not be closed either: {said(error).rstrip('.')}. What it has recorded may be incomplete."
                )
                self._untold.append(f"The tracker {self.name!r} {closed}")
        if self._is_abandoned:
            self._log_untold()

    def _next(self) -> tuple[str, Job, int] | None:
        """The next job, for which it waits until the tracker should flush."""
        try:
            if self._flush_at is None:
                return self._jobs.get()
            if (wait := self._flush_at - time.monotonic()) > 0:
                return self._jobs.get(timeout=wait)
        except Empty:
            pass
        self._flush_at = None
        return "flush()", self._flush, 0

    def _log_untold(self) -> None:
        for text in self.untold():
            logger.warning("%s", text)
