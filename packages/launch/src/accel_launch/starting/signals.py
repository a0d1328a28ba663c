"""A launcher's signals while its ranks run: it passes them on, and ends after the ranks."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

ENDING = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT")
"""Signals that end the run: the ranks are told, and have time to end."""

PASSED_ON = ("SIGUSR1", "SIGUSR2")
"""Signals that are for the ranks: Slurm announces the end of a job with them."""

_APART = 0.2
"""Seconds: of two Ctrl-C that come closer, a terminal sent one and a program around this one passed it on."""


class Ended(BaseException):
    """The launcher was told to end, before there was anybody to pass that on to."""


class Signals:
    """Handles the signals of the launcher in a `with` block, and restores all handlers after it.

    A second Ctrl-C kills the ranks.

    What the process ignores stays ignored: `nohup` lets it live on without a terminal, and shells
    protect what runs in the background from Ctrl-C. Outside of the main thread, where Python allows
    no handlers, nothing is changed.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None  # the first one that ends the run
        # Returns what is raised in the main thread.
        self.interrupt: Callable[[signal.Signals], BaseException] = lambda _: Ended()
        # Sends a signal to the ranks.
        self.pass_on: Callable[[signal.Signals], None] = lambda _: None
        # Is called when a process has ended that was started here.
        self.child_ended: Callable[[], None] = lambda: None
        self._before: dict[signal.Signals, Any] = {}
        self._holds, self._raised, self._since = 0, False, 0.0

    def __enter__(self) -> Signals:
        if threading.current_thread() is not threading.main_thread():
            return self
        names = (*ENDING, *PASSED_ON, "SIGCHLD")
        for number in (getattr(signal, name) for name in names if hasattr(signal, name)):
            before = signal.getsignal(number)
            if before is not None:  # a handler that is not Python's
                self._before[number] = before
        self.install()
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def install(self) -> None:
        """Puts the handlers in force, again if somebody else has taken their place."""
        tell = lambda number, _: self.pass_on(signal.Signals(number))  # noqa: E731
        handlers = {**dict.fromkeys(PASSED_ON, tell), "SIGCHLD": lambda *_: self.child_ended()}
        for number, before in self._before.items():
            ignored = before is signal.SIG_IGN and number.name != "SIGCHLD"
            signal.signal(number, before if ignored else handlers.get(number.name, self._end))

    @contextmanager
    def held(self) -> Iterator[None]:
        """A block that no signal interrupts: ranks get it at once; it is raised after the block."""
        self._holds += 1
        try:
            yield
        finally:
            self._holds -= 1
        if self.received is not None and not self._raised and not self._holds:
            self._raised = True
            raise self.interrupt(self.received)

    def _end(self, number: int, _: FrameType | None) -> None:
        given = signal.Signals(number)
        if given == self.received == signal.SIGINT and time.monotonic() - self._since > _APART:
            given = signal.Signals(getattr(signal, "SIGKILL", number))
        if self.received is None:
            self.received, self._since = given, time.monotonic()
        if self._holds or self._raised:
            self.pass_on(given)
            return
        self._raised = True
        raise self.interrupt(given)
