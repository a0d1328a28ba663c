"""Flags that any rank sets and all see: `Trigger`, and signals of a scheduler or terminal.

The first arrival of a signal is noted, and nothing else happens; further ones within `GRACE` count
as the same, for launchers often tell a rank twice. A later one does what it did before `watch`.
"""

from __future__ import annotations

import os
import signal
import threading
import time
import weakref
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch

from accel_core.collectives.reduce_gather import channel_of
from accel_core.processes.mismatch_report import describe

if TYPE_CHECKING:
    from accel_core.processes.world import World

GRACE = 5.0  # seconds; more than launchers take to pass a signal on


class Trigger:
    """A flag that one rank sets for all to see: that a loss is NaN, say."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._sets = 0
        self._seen = 0  # how many of them all ranks know of

    def set(self) -> None:
        """Sets it; all see that at the next `check`. No collective; signal handlers may call it."""
        self._sets += 1

    def check(self) -> bool:
        """Whether any rank has set it since this was true. Collective unless in a world of one."""
        sets = self._sets
        found = anywhere(self._world, "check_trigger", sets > self._seen)
        if found:
            self._seen = sets  # a `set` that came after the flag had left is for the next call
        return found


def anywhere(world: World, call: str, here: bool) -> bool:
    """Whether a flag is set on any rank, for the method `call`. Collective unless alone."""
    channel = channel_of(world, None)
    if channel is None:
        return here
    letter = channel.letter(call, lambda: describe(call), [(torch.bool, ())], [1], stacked=True)
    ((flags,),) = channel.exchange(letter, [torch.tensor(here)])
    return bool(flags.any())


class Preemption:
    """Lets all ranks of a world know that one of them was told to stop."""

    def __init__(self, world: World, grace: float = GRACE) -> None:
        self._world, self._grace = world, grace
        self._known = False  # to all ranks
        self._arrived: list[str] = []
        self._handlers: dict[signal.Signals, _Handler] = {}
        weakref.finalize(self, _release, self._handlers).atexit = False  # an exit that has begun goes on

    def watch(self, *signals: signal.Signals | int | str) -> None:
        """See `Accelerator.stop_on_signal`. Raises outside of the main thread."""
        for number in [_number(given) for given in signals or (signal.SIGTERM,)]:
            if number not in self._handlers:
                self._handlers[number] = _Handler(number, self._arrived, self._grace)

    @property
    def received(self) -> str | None:
        """The name of the first signal that arrived on this rank, or None. No collective."""
        return self._arrived[0] if self._arrived else None

    def check(self) -> bool:
        """Whether a signal arrived on any rank, for good. Collective until then, if not alone."""
        if not self._known:
            self._known = anywhere(self._world, "should_stop", bool(self._arrived))
        return self._known

    def close(self) -> None:
        """Puts back the earlier handlers, unless replaced, or outside of the main thread."""
        _release(self._handlers)


class _Handler:
    """Notes a signal's first arrival in this process in `arrived`; later ones pass."""

    def __init__(self, number: signal.Signals, arrived: list[str], grace: float) -> None:
        self._number, self._arrived, self._grace = number, arrived, grace
        self._first: float | None = None  # when it arrived, by the monotonic clock
        self._process = os.getpid()
        self._active = True
        self._before: Any = signal.getsignal(number)
        signal.signal(number, self)  # from here on a signal may come, and needs all of the above

    def __call__(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        stacked: list[_Handler] = []  # this one, and those of other Accelerators that it took the place of
        handler: Any = self
        while isinstance(handler, _Handler):
            stacked.append(handler)
            handler = handler._before
        if any([each._takes(now) for each in stacked]):  # all are to know
            return
        for each in stacked:
            each.stand_aside()
        before = self._previous()
        if callable(before):
            before(number, frame)
        elif before == signal.SIG_DFL:
            # The handler in force may be somebody's who calls ours: a signal that is raised to that would come back here.
            in_force = signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
            signal.signal(number, in_force)

    def _takes(self, now: float) -> bool:
        """Whether an arrival is for the owner: the first, which is noted, or within `GRACE`."""
        # A forked child inherits the handler, but not the owner who asks for notes: there it must end whom it ended before.
        if not self._active or os.getpid() != self._process:
            return False
        if self._first is None:
            self._first = now
            self._arrived.append(self._number.name)
            return True
        return now - self._first < self._grace

    def stand_aside(self) -> None:
        """Notes nothing more, and puts the previous handler back if this is the one in force."""
        self._active = False
        in_force: object = signal.getsignal(self._number)
        if in_force is self and threading.current_thread() is threading.main_thread():
            signal.signal(self._number, self._previous())

    def _previous(self) -> Any:
        """The handler before this one that still has something to do."""
        before = self._before
        while isinstance(before, _Handler) and not before._active:
            before = before._before
        return before


def _release(handlers: dict[signal.Signals, _Handler]) -> None:
    for handler in handlers.values():
        handler.stand_aside()
    handlers.clear()


def _number(given: signal.Signals | int | str) -> signal.Signals:
    return signal.Signals[given] if isinstance(given, str) else signal.Signals(given)
