"""The batch that a forward uses, in loops that may draw batches before they use them.

A feed knows the batch that a loader has yielded last. A loop that draws the batches of a whole
window first, or one ahead, calls the model with an earlier one. So draws are counted: where more
than one came between two looks, it is not known from then on which batch the model is called with.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from accel_core import Passage
from accel_core.api.component import ClassOverride

if TYPE_CHECKING:
    from accel_core import Feed, Rows
    from accel_core.api.diagnostics import Drawn

Used = list[tuple["Drawn", "Rows | None"]]
"""What the batches were made of that a forward may use, one entry per iteration, outermost first; see `Feed.current_drawn`."""


class CountingFeed(ClassOverride):
    """A feed that counts, which `dress` makes of one; each call of `current_drawn` is a look."""

    newest: Any
    latest: Any
    latest_drawn: Any
    _live: list[Any]
    draws = 0  # since the last look, of all passages
    is_ahead = False

    def enter(self, by: object = None) -> Passage:
        """A new innermost passage, which counts; see `Feed.enter`."""
        passage = CountingPassage(self, by)  # type: ignore[arg-type]
        self.newest = weakref.ref(passage)
        self._live.append(self.newest)
        return passage

    def current_drawn(self) -> Used:
        """The pairs of `Feed.current_drawn`; None as drawn if batches are not used one by one."""
        live = [passage for passage in (ref() for ref in self._live) if passage is not None]
        used = [passage.look() for passage in live if isinstance(passage, CountingPassage)]
        if self.draws:
            self.is_ahead = self.draws > 1 if not used else any(drawn is None for drawn, _ in used)
            self.draws = 0
        return used or [(None if self.is_ahead else self.latest_drawn, self.latest)]


class CountingPassage(Passage):
    """One iteration that counts its draws."""

    __slots__ = ("draws", "is_ahead")

    def __init__(self, feed: Feed, by: object = None) -> None:
        super().__init__(feed, by)
        self.draws = 0
        self.is_ahead = False

    def advance(self, remaining: int | None, rows: Rows | None = None, drawn: Drawn = None) -> None:
        """Reports the batch that is about to be yielded, and counts it."""
        super().advance(remaining, rows, drawn)
        self.draws += 1
        feed: Any = self._feed
        feed.draws += 1

    def look(self) -> tuple[Drawn, Rows | None]:
        """The samples and rows of the latest batch; samples are None if it may be used later."""
        self.is_ahead = self.is_ahead or self.draws > 1
        self.draws = 0
        return None if self.is_ahead else self.drawn, self.rows


class Window:
    """The micro-batches of one call of `forward_backward`, which draws them one ahead."""

    def __init__(self, feed: Feed, micro_batches: Iterable[Any], inputs: Callable[[Any], Any]) -> None:
        self._feed = feed
        self._micro_batches = micro_batches
        self._inputs = inputs
        self._waiting: deque[Used] = deque()
        self.used: Used = []

    def __iter__(self) -> Iterator[Any]:
        for batch in self._micro_batches:
            self._waiting.append(self._feed.current_drawn())
            yield batch

    def inputs(self, batch: Any) -> Any:
        """The result of the user's function; from now on, `used` is about this micro-batch."""
        self.used = self._waiting.popleft()
        return self._inputs(batch)
