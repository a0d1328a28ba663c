"""A tracker in a thread of its own, so that nothing that it does, or fails to do, reaches the training.

    lane = Lane("mine", rules, close, rest)
    lane.put("start()", start)         # hands a job over; never waits
    lane.wait(rules.start_timeout)     # waits, where somebody has to

**A job that raises** is the last: the tracker is switched off, and closed as well as it can be.

**A job that takes too long** is not waited for: the tracker is switched off, and its thread is left
to itself. Threads are daemons, so one that never comes back does not keep the program from ending.

**Failures are told where the training runs**, by whoever asks for `untold`: an exception or a
warning in another thread would be seen by nobody. What is switched off gets nothing more, and what
was waiting for it is dropped.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

from accel_trackers.recording.scalars import said

if TYPE_CHECKING:
    from accel_core import TrackingKwargs

Job = Callable[[], None]

REST = 2.0
"""Seconds without a job after which a tracker rests."""

LONGEST = 10.0
"""Seconds after which it rests between two jobs."""

MOST_TOLD = 20
"""Of how many things that are left out one is told."""


class Lane:
    """Runs the jobs of one tracker, one after the other.

    Args:
        name: of the tracker.
        rules: how long a job may take, and how many may wait.
        close: called once in the same thread, when a job has failed, whatever it raises then.
        rest: a job that runs when there has been nothing to do for a while, once until there is
            again, and now and then.
        threaded: False: jobs run where they are handed over, which waits for them.
    """

    def __init__(self, name: str, rules: TrackingKwargs, close: Job, rest: Job, *, threaded: bool = True) -> None:
        self.name = name
        self.failure: str | None = None
        self.cause: BaseException | None = None
        self.when_over: Job | None = None  # called in the thread, at its end, if there is nothing to be told
        self._rules = rules
        self._close = close
        self._rest = rest
        self._untold: deque[str] = deque()
        self._left_out: set[str] = set()
        self._jobs: SimpleQueue[tuple[str, Job, int] | None] = SimpleQueue()
        self._changed = threading.Condition()  # re-entrant: a signal handler may log
        self._handed = self._done = 0  # by weight
        self._is_ending = False
        self._rested = True
        self._active_since = 0.0
        self._doing = ""
        self._since: float | None = None
        self._is_stuck = False
        self._thread: threading.Thread | None = None
        if threaded:
            self._thread = threading.Thread(target=self._work, name=f"accel tracker {name}", daemon=True)
            self._thread.start()

    @property
    def pending(self) -> int:
        """The total weight of the jobs that were handed over and are not done."""
        return self._handed - self._done

    def put(self, doing: str, job: Job, weight: int = 1, *, last: bool = False) -> None:
        """Hands a job over, unless the tracker is switched off.

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
            if is_late:
                self.leave_out("what is logged while the run ends, or later.", kind="late")
                return
            if self.has_thread:
                self._hand_over(doing, job, weight)
                if last:
                    self._jobs.put(None)
                return
        self._do(doing, job)

    @property
    def has_thread(self) -> bool:
        """Whether jobs run in a thread of the tracker's own."""
        return self._thread is not None

    @property
    def is_over(self) -> bool:
        """Whether nothing more happens here, and nothing is left to be told."""
        return self._is_ending and not self._untold and (self.failure is not None or self.pending == 0)

    def wait(self, timeout: float) -> bool:
        """Whether everything that was handed over is done, which is waited for; or the tracker was switched off."""
        target = self._handed
        with self._changed:
            return self._changed.wait_for(lambda: self._done >= target or self.failure is not None, timeout)

    def join(self, timeout: float) -> None:
        """Waits for the end of the thread, in which a tracker that failed is closed; not of one that is stuck."""
        if self._thread is not None and not self._is_stuck:
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
        """Notes that something cannot be recorded; the tracker goes on.

        Args:
            reason: what, and why.
            kind: of which one is told; empty: the reason itself.
        """
        if (kind or reason) not in self._left_out and len(self._left_out) < MOST_TOLD:
            self._left_out.add(kind or reason)
            self._untold.append(f"The tracker {self.name!r} leaves out {reason}")
            if len(self._left_out) == MOST_TOLD:
                self._untold.append(
                    f"The tracker {self.name!r} has left out {MOST_TOLD} things; of further ones nothing is said."
                )

    def give_up(self, reason: str, cause: BaseException | None = None, *, stuck: bool = False) -> None:
        """Switches the tracker off, and drops what was waiting for it; `stuck`: its thread may never come back."""
        with self._changed:
            if self.failure is not None:
                return
            self.failure, self.cause, self._is_stuck = reason, cause, stuck
            self._untold.append(f"The tracker {self.name!r} is switched off: {reason}.")  # before anybody is woken
            dropped, self._jobs = self._jobs, SimpleQueue()
            for each in (dropped, self._jobs):
                each.put(None)  # for a thread that waits for the next job, in whichever of the two
            self._changed.notify_all()

    def untold(self) -> list[str]:
        """The messages since the last call."""
        found = []
        while self._untold:
            found.append(self._untold.popleft())
        return found

    def give_up_if_stalled(self) -> bool:
        """Switches the tracker off if a job has taken too long; whether it is switched off."""
        since = self._since
        if since is not None and time.monotonic() - since > self._rules.stall_timeout:
            self.give_up(f"{self._doing} has taken more than {self._rules.stall_timeout:g} s", stuck=True)
        return self.failure is not None

    def _hand_over(self, doing: str, job: Job, weight: int) -> None:
        if self.give_up_if_stalled():
            return
        if self._handed - self._done >= self._rules.most_pending:
            self.give_up(f"it is {self._rules.most_pending} records behind", stuck=True)
        else:
            self._handed += weight
            self._jobs.put((doing, job, weight))

    def _work(self) -> None:
        while self.failure is None:
            item = self._next()
            if item is None or self.failure is not None:
                break
            doing, job, weight = item
            self._doing, self._since = doing, time.monotonic()
            self._do(doing, job)
            self._since = None
            self._rested = self._rested and not weight
            with self._changed:
                self._done += weight
                self._changed.notify_all()
        if self.failure is not None:
            self._close_after_failure()
        if self.is_over and self.when_over is not None:
            self.when_over()

    def _next(self) -> tuple[str, Job, int] | None:
        """The next job, for which it waits; before it waits long, it rests."""
        if self._rested:
            self._active_since = time.monotonic()
            return self._jobs.get()
        try:
            due = time.monotonic() - self._active_since > LONGEST
            return self._rest_now() if due else self._jobs.get(timeout=REST)
        except Empty:
            return self._rest_now()

    def _rest_now(self) -> tuple[str, Job, int]:
        self._rested, self._active_since = True, time.monotonic()
        return "flush()", self._rest, 0

    def _do(self, doing: str, job: Job) -> None:
        try:
            job()
        except BaseException as error:
            if self._thread is None and not isinstance(error, Exception):
                raise  # what a signal raises in the thread that the training runs in
            self.give_up(f"{doing} raised {said(error).rstrip('.')}", error)
            if self._thread is None:
                self._close_after_failure()

    def _close_after_failure(self) -> None:
        try:
            self._close()
        except BaseException as error:  # noqa: BLE001
            self._untold.append(
                f"The tracker {self.name!r} could not be closed either: {said(error).rstrip('.')}. What it has recorded may "
                f"be incomplete."
            )
