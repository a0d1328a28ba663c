"""The end of a run's recording: exit of the program, other ranks, the Accelerator that is gone."""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING
from weakref import ref

from accel_core.api.tracker import end_worlds, fatal_error

if TYPE_CHECKING:
    from accel_trackers.recording.recorder import Recorder

_QUIET = 5.0  # seconds of waiting at the end, before it is said what for
_HURRY = 30.0  # seconds that a program which ends because of an exception waits for its trackers

logger = logging.getLogger(__name__)


def finish(recorders: Sequence[Recorder], timeout: float, *, failed: bool) -> None:
    """Has all of them closed, and waits for that."""
    for each in recorders:
        each.finish(failed)
    quiet, deadline = time.monotonic() + min(_QUIET, timeout), time.monotonic() + timeout
    for each in recorders:
        if not each.wait(left(quiet)):
            logger.warning("Waiting for the tracker %r to record the rest, for %g s at most.", each.name, timeout)
            if not each.wait(left(deadline)):
                each.give_up(f"at the end {each.pending} records were not done within {timeout:g} s, and may be lost")
        each.join(left(deadline))


def finish_at_exit(references: Sequence[ref[Recorder]], timeout: float, process: int) -> None:
    """At the end of a program that did not call `end_training`."""
    if os.getpid() != process:
        return  # forked from the one that records, whose threads are not here
    recorders = [each for each in (reference() for reference in references) if each is not None]
    failed = fatal_error() is not None
    with _ends_already():
        try:
            # The others are parted from first: they would wait for this rank, and no longer than seconds.
            end_worlds()
        except BaseException:
            failed = True
            raise
        finally:
            finish(recorders, min(timeout, _HURRY) if failed else timeout, failed=failed)
            for each in recorders:
                each.abandon()


def let_go(recorders: Sequence[Recorder], process: int) -> None:
    """Ends recorders whose Accelerator is gone without `end_training`; never waits, in any thread.

    The thread of a recorder keeps it until everything is recorded, for which the exit waits.
    """
    if os.getpid() == process:
        for each in recorders:
            each.abandon()
            each.finish(failed=False)


def is_failing() -> bool:
    """Whether an exception is being raised; `sys.exit(0)` and `GeneratorExit` do not count."""
    error = sys.exc_info()[1]
    if isinstance(error, SystemExit):
        return error.code is not None and error.code != 0
    return error is not None and not isinstance(error, GeneratorExit)


def left(deadline: float) -> float:
    """The seconds until a moment of `time.monotonic`; 0.0 after it."""
    return max(deadline - time.monotonic(), 0.0)


@contextmanager
def _ends_already() -> Iterator[None]:
    """Ignores SIGTERM while this rank ends: launchers send it to other ranks when one fails."""
    # Not SIG_IGN, which processes that are started now would inherit.
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)
