"""The position of a loader: seed, epoch, and the number of samples yielded of the global order.

A position says nothing about ranks, so a state that four processes saved is continued by two. It
counts what was yielded; what workers have fetched ahead is fetched again.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from accel_core.api.loader import IndexRead, SourceIteration, SourceProgress


class EpochProgress(SourceProgress):
    """The progress of an iteration; `extras` are entries for the state, kept up to date.

    `end`: its samples behind the last batch, over all ranks; None while that is not known.
    """

    __slots__ = ("end", "extras")

    def __init__(self, epoch: int, samples: int, extras: Mapping[str, Any] | None = None) -> None:
        super().__init__(epoch, samples)
        self.extras: Mapping[str, Any] = extras or {}
        self.end: int | None = None

    def position(self) -> Start:
        """The position in the epoch. It says whether the last batch was yielded."""
        ended = self.end is not None and self.samples >= self.end
        return Start(self.epoch, self.samples, {**self.extras, "ended": True} if ended else self.extras)


@dataclass(frozen=True)
class Start:
    """The position at which an iteration begins.

    `extras` is what else was in the state that is continued, empty at an ordinary beginning;
    `skipped` batches of this rank are left out from there.
    """

    epoch: int
    samples: int = 0
    extras: Mapping[str, Any] = field(default_factory=dict)
    skipped: int = 0

    def leaving_out(self, batches: int, *, restarts: bool) -> Start:
        """The start of an iteration that leaves out the first batches of this rank.

        What was loaded inside an epoch has left them out already, unless it `restarts`: then they
        are counted from the beginning of the epoch, of whose state the generators are kept, for
        they draw its order.
        """
        if not self.samples:
            return replace(self, skipped=batches)
        return replace(self.at_beginning(), skipped=batches) if restarts and batches else self

    def at_beginning(self) -> Start:
        """The start of its epoch: of its state the generators are kept, which draw the order."""
        extras = {name: value for name, value in self.extras.items() if name == "generators"}
        return Start(self.epoch, 0, extras)


class Epochs:
    """Numbers the iterations of one loader. Each that is advanced at least once is an epoch.

    Attributes:
        following: the epoch that comes next.
        begins_from_a_state: whether a state was loaded with which the dataset stands at an end.
        current: the progress of the iteration begun last, since an epoch or a state was set.
        has_opened: whether there was an iteration, so that the dataset may have been read.
    """

    def __init__(self) -> None:
        self.following = 0
        self.begins_from_a_state = False
        self.has_opened = False
        self._pending: Start | None = None  # where the next iteration continues an epoch
        self.current: EpochProgress | None = None
        self._latest: weakref.ref[EpochOpening] | None = None

    def set(self, epoch: int) -> None:
        """The next iteration is `epoch`; it goes on from a loaded state of this epoch."""
        if self._pending is not None and self._pending.epoch != epoch:
            warnings.warn(
                f"loader.set_epoch({epoch}) gives up the position that was loaded: epoch {self._pending.epoch}, "
                f"{self._pending.samples} samples. To go on from there, begin with loader.set_epoch({self._pending.epoch}).",
                stacklevel=3,
            )
            self._pending = None
        self.following = epoch
        self.current = self._latest = None

    def restore(self, start: Start) -> None:
        """The next iteration continues there."""
        self.following = start.epoch
        self._pending = start
        self.current = self._latest = None

    @property
    def resumes(self) -> bool:
        """Whether the next iteration goes on inside an epoch: a position in it was loaded."""
        return self._pending is not None and self._pending.samples > 0

    @property
    def restarts(self) -> bool:
        """Whether the next iteration is the first of this process in a run that was continued."""
        pending = self._pending
        return pending is not None and not pending.samples and pending.epoch > 0 and not self.has_opened

    def position(self) -> Start:
        """The position of the latest iteration; the start of the next epoch once it has ended."""
        current = self.current
        if current is not None and not current.finished:
            return current.position()
        if current is None and self._pending is not None:
            return self._pending
        return Start(self.following)

    def next(self) -> Start:
        """The start of an iteration that is opened now.

        One that was opened before, and may still be advanced, has its own epoch:
        `zip(loader, loader)` pairs two.
        """
        latest = self._latest() if self._latest is not None else None
        epoch = self.following if latest is None else max(self.following, latest.progress.epoch + 1)
        if self._pending is not None and self._pending.epoch == epoch:
            return self._pending
        return Start(epoch)

    def open(self, start: Start, reads: Iterator[IndexRead] | None = None) -> EpochOpening:
        """An iteration that begins there."""
        self.has_opened = True
        opening = EpochOpening(self, start, iter(()) if reads is None else reads)
        self._latest = weakref.ref(opening)
        return opening

    def waiting(self) -> EpochOpening | None:
        """The latest iteration, if it was opened and not advanced yet."""
        latest = self._latest() if self._latest is not None else None
        return None if latest is None or latest.progress is self.current else latest

    def begin(self, progress: EpochProgress) -> None:
        """An iteration is advanced for the first time."""
        self.following = max(self.following, progress.epoch + 1)
        self.current = progress
        self._pending = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_latest": None, "current": None}


class EpochOpening(SourceIteration):
    """One iteration of a numbered epoch."""

    __slots__ = ("_epochs",)

    progress: EpochProgress

    def __init__(self, epochs: Epochs, start: Start, reads: Iterator[IndexRead]) -> None:
        extras = {name: value for name, value in start.extras.items() if name != "ended"}
        super().__init__(reads, EpochProgress(start.epoch, start.samples, extras))
        self._epochs = epochs

    def start(self) -> None:
        """The epoch begins, or goes on."""
        self._epochs.begin(self.progress)


def tell_epoch(epoch: int, *targets: object) -> None:
    """Passes the epoch on to those that take it: datasets, batch samplers, samplers."""
    for target in targets:
        forward = getattr(target, "set_epoch", None)
        if forward is not None:
            forward(epoch)
