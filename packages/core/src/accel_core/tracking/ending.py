"""How the recording of a run begins and ends, beside the program: its random streams, its exit, and the other ranks."""

from __future__ import annotations

import atexit
import logging
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING
from weakref import ref

from accel_core import streams, world

if TYPE_CHECKING:
    from accel_core.tracking.recorder import Recorder
    from accel_core.tracking.rules import TrackingKwargs

_QUIET = 5.0  # seconds of waiting at the end, before it is said what for
_HURRY = 30.0  # seconds that a program which ends because of an exception waits for its trackers

logger = logging.getLogger(__name__)


@contextmanager
def streams_kept(recorders: Sequence[Recorder], rules: TrackingKwargs) -> Iterator[None]:
    """Waits for what was started inside, and puts the random streams back where they were before.

    The device's is left alone: asking for it would wait for the device, and no service computes there.
    """
    states = streams.capture(None)
    deadline = time.monotonic() + rules.start_timeout
    try:
        yield
        for each in recorders:
            if not each.lane.wait(_left(deadline)):
                each.lane.give_up(f"start() has taken more than {rules.start_timeout:g} s", stuck=True)
    finally:
        streams.restore(states, None)


def finish(recorders: Sequence[Recorder], timeout: float, *, failed: bool) -> None:
    """Has all of them closed, and waits for that."""
    for each in recorders:
        each.finish(failed)
    deadline = time.monotonic() + timeout
    quiet = time.monotonic() + _QUIET
    for each in recorders:
        if not each.lane.wait(min(_left(deadline), _left(quiet))):
            logger.warning(
                "Waiting for the tracker %r to record what is pending, for %g s at most.", each.name, timeout
            )
            if not each.lane.wait(_left(deadline)):
                lost = f"at the end {each.lane.pending} records were not done within {timeout:g} s, and may be lost"
                each.lane.give_up(lost, stuck=True)
        each.lane.join(_left(deadline))


def finish_at_exit(references: Sequence[ref[Recorder]], rules: TrackingKwargs, process: int) -> None:
    """At the end of a program that did not call `end_training`. A recorder lives as long as its thread works."""
    if os.getpid() != process:
        return  # forked from the one that records, whose threads are not here
    recorders = [each for each in (reference() for reference in references) if each is not None]
    failed = world._fatal_error() is not None
    with _terminated_later():
        # The others are parted from first: they would wait for this rank, and no longer than seconds.
        atexit.unregister(world._end_all)
        world._end_all()
        finish(recorders, min(rules.finish_timeout, _HURRY) if failed else rules.finish_timeout, failed=failed)
    for each in recorders:
        for text in each.lane.untold():
            logger.warning("%s", text)


def let_go(recorders: Sequence[Recorder]) -> None:
    """The Accelerator is gone, and did not call `end_training`. Nobody waits here: this may be any thread."""
    for each in recorders:
        each.finish(failed=False)


@contextmanager
def _terminated_later() -> Iterator[None]:
    """Holds SIGTERM back: launchers send it to the ranks that are left when one fails, and this one is ending already."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)


def _left(deadline: float) -> float:
    return max(deadline - time.monotonic(), 0.0)
