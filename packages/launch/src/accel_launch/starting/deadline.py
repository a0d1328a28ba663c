"""Waiting with a deadline, which says meanwhile what for."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta

from accel_launch.output import warn

POLL = 0.05
FIRST_LINE = 5.0
"""Seconds after which a line says what is waited for."""
NEXT_LINE = 60.0
"""Seconds between two such lines."""


class Patience:
    """A deadline of one wait.

    Args:
        timeout: how long to wait; None: for ever.
    """

    def __init__(self, timeout: timedelta | None) -> None:
        self._start = time.monotonic()
        self._end = float("inf") if timeout is None else self._start + timeout.total_seconds()
        self._line = self._start + FIRST_LINE

    @property
    def waited(self) -> timedelta:
        """So far, in whole seconds."""
        return timedelta(seconds=round(time.monotonic() - self._start))

    def wait(self, what: Callable[[], str]) -> bool:
        """Waits a moment; False once the time is over. Now and then it prints `what()`."""
        now = time.monotonic()
        if now >= self._end:
            return False
        if now >= self._line:
            self._line = now + NEXT_LINE
            warn(f"accel launch: {what()}")
        time.sleep(POLL)
        return True
