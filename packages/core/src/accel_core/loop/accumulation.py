"""Windows of gradient accumulation: which micro-batch opens or closes one, and its weight.

The gradient of a window is the mean over the micro-batches that are really in it, so their number
has to be known when it *opens*, hence the feed: loaders report how many batches remain.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakMethod

if TYPE_CHECKING:
    from torch import nn

    from accel_core.contract.loader_progress import Feed

_STATE = ("open", "steps", "position", "size", "backwards", "total_backwards")


class Accumulation:
    """The window of one Accelerator. While it is open, optimizers and schedulers are held back.

    `rescale`, a bound method, multiplies the gradients that are pending when a window turns out
    shorter. `synchronises`: whether gradients stay local until the closing backward.
    `mean_over_steps`: whether each micro-batch weighs 1/steps, also in a shorter window.
    """

    def __init__(
        self,
        steps: int,
        feed: Feed,
        rescale: Callable[[float], None],
        *,
        sync_with_dataloader: bool = True,
        sync_each_batch: bool = False,
        synchronises: bool = False,
        mean_over_steps: bool = False,
    ) -> None:
        self.steps = steps
        self._mean_over_steps = mean_over_steps
        self.synchronises = synchronises
        self.feed = feed
        self.sync_each_batch = sync_each_batch
        self._sync_with_dataloader = sync_with_dataloader
        self._rescale = WeakMethod(rescale)  # what was prepared is not kept alive by an optimizer's gate
        self.optimizers = 0  # how many it holds back
        self.serial = 0
        self.total_backwards = 0
        self.reset()

    def reset(self) -> None:
        """Forgets an open window."""
        self.position = 0  # micro-batches of the window so far, the present one included
        self.size = self.steps  # micro-batches that the window is to have
        self.open = False
        self.inside = False  # between `__enter__` and `__exit__` of `accumulate`
        self.failed = False  # whether an error ended the last micro-batch
        self.backwards = 0  # backwards in the window
        self.micro_backwards = 0  # backwards in the present micro-batch
        self.by_caller = False  # whether the caller says which micro-batch closes the window
        self._deferred: list[Callable[[], None]] = []

    def enter(self, closes: bool | None = None) -> bool:
        """A micro-batch begins. Returns whether it closes the window; None: its number decides."""
        self.inside = True
        self.micro_backwards = 0
        if closes is None and self.by_caller and self.open:
            closes = self.position + 1 >= self.steps
        by_caller = closes is not None
        if self.steps == 1 and not by_caller:
            if self.by_caller:
                self._settle()
                self.by_caller, self.size = False, 1
            self.serial += 1
            self.backwards = 0
            return True
        remaining = self.feed.begin_step() if self._sync_with_dataloader and not by_caller else None
        size = self.steps if remaining is None else min(self.steps, self.position + remaining + 1)
        if self.position == 0:
            self._begin_window(size)
        self.by_caller = by_caller
        self.position += 1
        if closes is None:
            closes = self.position >= size
        self._resize_window(self.position if closes else self.size if by_caller else size)
        self.open = not closes
        return closes

    def leave(self, failed: bool = False) -> None:
        """The micro-batch has ended."""
        self.inside, self.failed = False, failed
        if not self.open:
            self.position = 0

    def count_backward(self) -> None:
        """A backward is about to run."""
        if self._deferred and not self.inside:
            self._settle()
        self.backwards += 1
        self.micro_backwards += 1
        self.total_backwards += 1

    def whole_window(self) -> None:
        """`forward_backward` begins: a window of its own, neither held open nor averaged again."""
        self._begin_window(1)
        self.micro_backwards = 0

    def _begin_window(self, size: int) -> None:
        self._settle()
        self.serial += 1
        self.backwards = 0
        self.size = size

    def _settle(self) -> None:
        for drop in self._deferred:
            drop()
        self._deferred.clear()

    @property
    def weight(self) -> float:
        """What each micro-batch of the window weighs."""
        return 1.0 / (self.steps if self._mean_over_steps else self.size)

    def _resize_window(self, size: int) -> None:
        # A batch had several micro-batches; an earlier loop was left in the middle of a window and the loader that goes on is
        # shorter than the rest of it; or the caller closes it. What was accumulated weighs 1/before each, and is to weigh 1/size.
        if size != self.size:
            before, self.size = self.weight, size
            if self.weight != before and (rescale := self._rescale()) is not None:
                rescale(self.weight / before)

    def state_dict(self) -> dict[str, Any]:
        """The state of the window, between two micro-batches."""
        return {name: getattr(self, name) for name in _STATE}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on where the state was taken: in its window, or with a new one."""
        self.reset()
        self.total_backwards = state["total_backwards"]
        if state["open"]:
            self.serial += 1
            self.open = True
            self.position, self.size, self.backwards = state["position"], state["size"], state["backwards"]
            self.by_caller = not 0 < self.position < self.size  # its number would have closed it

    @property
    def _has_windows(self) -> bool:
        return self.steps > 1 or self.by_caller

    def hold(self, back: bool) -> None:
        """Holds optimizers back, or lets them step, until the caller says otherwise."""
        if back and not self.open:
            self._begin_window(self.steps)
        self.by_caller, self.open, self.failed = True, back, False

    def refuse_in_window(self, option: str, value: object) -> None:
        """Raises `RuntimeError` in a window, unless an error ended its last micro-batch."""
        if self.inside or (self.open and not self.failed):
            what = f"accelerator.{option} = {value!r} was asked for while a window of accumulation is open."
            raise RuntimeError(f"{what} Assign it before the first accumulate() of a window.")

    def resize(self, steps: int) -> None:
        """Windows have so many micro-batches from now on. Between two windows only."""
        self._settle()
        self.steps = self.feed.lookahead = steps
        self.reset()

    def lacks_backward(self, settled: int) -> bool:
        """Whether a step would use uncounted gradients; `settled`: the last window that stepped."""
        return self._has_windows and self.serial > 0 and self.backwards == 0 and settled != self.serial

    @property
    def lacks_synchronisation(self) -> bool:
        """Whether a step now would use local gradients: the closing micro-batch had no backward."""
        stays_local = self.synchronises and not self.sync_each_batch and self._has_windows and self.size > 1
        return stays_local and self.backwards > 0 and self.micro_backwards == 0

    def is_pending(self, settled: int) -> bool:
        """Whether `zero_grad` would destroy gradients of a window of several micro-batches."""
        return self._has_windows and self.backwards > 0 and settled != self.serial and (self.open or self.inside)

    def defer(self, drop: Callable[[], None]) -> None:
        """`drop` is called before the next window begins, or the next backward behind the block.

        A closing micro-batch's `zero_grad` may come first, before its step, or last, without one.
        """
        self._deferred.append(drop)


@dataclass(slots=True)
class Accumulate:
    """The context manager of `Accelerator.accumulate`: one micro-batch. A class, for speed."""

    accumulation: Accumulation
    models: Sequence[nn.Module]
    no_sync: Any
    closes: bool | None = None
    contexts: Sequence[AbstractContextManager[None]] = ()

    def __enter__(self) -> None:
        accumulation = self.accumulation
        if accumulation.inside:
            what = "accumulate() was entered inside another accumulate() of the same Accelerator."
            raise RuntimeError(f"{what} Name all models in one call: accumulate(generator, discriminator).")
        if accumulation.enter(self.closes) or accumulation.sync_each_batch:
            return
        self.contexts = [self.no_sync(model) for model in self.models]
        for context in self.contexts:
            context.__enter__()

    def __exit__(self, *raised: Any) -> None:
        for context in reversed(self.contexts):
            context.__exit__(*raised)
        self.accumulation.leave(raised[0] is not None)
