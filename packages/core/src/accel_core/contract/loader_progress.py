"""Progress of the loaders, for gradient accumulation and exact metrics, without globals.

An iterator of a prepared loader enters the `Feed` of its Accelerator at its first `next`, advances
the `Passage` that it gets with every batch, and leaves at its end or death. Advancing one forgets
those entered after it, such as an evaluation that was broken out of, but for one that advances in
the same steps: a new epoch, beside an iterator that is kept over several. Every `accumulate` at the
last batch of the iterators that advanced last closes its window; metrics refer to the innermost
live passage, else to the batch yielded last.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

Drawn = Any
"""What a loader notes with every batch: its index batch, one index where there are no batches, or `Positions`. None if not known."""


class Rows(NamedTuple):
    """The rows of a batch on this rank (None if not countable), and its real ones, the first."""

    rows: int | None
    real: int


PASSED = Rows(None, -1)  # of a loop that has ended, and filled up its last batch: any batch may be meant
PlaceBatch = Callable[[Any, "Rows | None", "int | None", object], "tuple[Any, Rows | None]"]
"""`place(batch, rows, remaining, by)`: the batch on the device, and its rows if it is padded; `by` is one object per loader."""


class RunningLoader(NamedTuple):
    """A prepared loader in an iteration: batches known to follow, present rows. None: unknown."""

    loader: DataLoader[Any] | None
    remaining: int | None
    rows: Rows | None

    @property
    def is_last(self) -> bool:
        """Whether the present batch is the last one of the epoch."""
        return self.remaining == 0


class Passage:
    """One iterator's report of where it stands. Made by `Feed.enter`, advanced once per batch."""

    __slots__ = ("__weakref__", "_feed", "advanced", "ahead", "by", "drawn", "earlier", "entered", "remaining", "rows")

    def __init__(self, feed: Feed, by: object = None) -> None:
        self._feed, self.by, feed.passed = feed, by, None
        self.ahead = feed.lookahead  # no fewer are `remaining`; where it has grown since, perhaps more
        self.remaining: int | None = None
        self.rows: Rows | None = None
        self.drawn: Drawn = None
        self.entered, self.advanced = feed.step, -1  # the steps for which it was entered, and advanced last
        self.earlier = -1  # the step for which it advanced before that

    def advance(self, remaining: int | None, rows: Rows | None = None, drawn: Drawn = None) -> None:
        """Reports the batch about to be yielded. Hot: one `Rows` for full batches. None: unknown.

        Args:
            remaining: batches to come on this rank; without a length, those it looked ahead to.
            rows: of the batch on this rank.
            drawn: the index batch as the sampler gave it, or `accel_core.api.loader.Positions`.
        """
        feed = self._feed
        self.remaining = remaining
        self.rows = feed.latest = rows
        self.drawn = feed.latest_drawn = drawn
        if self.advanced != feed.step:
            self.earlier, self.advanced = self.advanced, feed.step
        if feed.newest() is not self:
            feed.forget_after(self)

    def leave(self, *, ended: bool = False) -> None:
        """Takes this iterator, which has ended or is collected, and dead ones off the list."""
        feed = self._feed
        feed.passed = self.rows if ended and feed.latest is self.rows else feed.passed
        feed._keep([ref for ref in feed._live if ref() is not None and ref() is not self])


class Feed:
    """The live passages of an Accelerator's loaders, outermost first, and flags for new ones."""

    def __init__(self, lookahead: int = 1) -> None:
        self.lookahead = lookahead  # how many batches a loader without a length looks ahead: the accumulation steps
        self.even_batches: bool | None = None  # whether ranks get equally many batches; None: as the loader was told
        self.place_batch: PlaceBatch | None = None  # of the strategy
        self.joining = False  # whether ranks may end at different batches: the strategy stands in for the ended
        self.latest: Rows | None = None  # of the batch that was yielded last
        self.latest_drawn: Drawn = None  # which samples those are
        self.step = 0  # how many micro-batches have begun
        self.passed: Rows | None = None  # `latest`, if the loop of that batch has ended
        self._live: list[weakref.ref[Passage]] = []
        self.newest: weakref.ref[Passage] | Callable[[], None] = _nobody  # what refers to the innermost passage

    def enter(self, by: object = None) -> Passage:
        """A new innermost passage, weakly referred to; `by` is the loader's `_accel_outlet`."""
        passage = Passage(self, by)
        self._keep([*self._live, weakref.ref(passage)])
        return passage

    def passage_of(self, by: object) -> Passage | None:
        """The newest live passage of the loader with this `_accel_outlet`."""
        return next((found for ref in reversed(self._live) if (found := ref()) is not None and found.by is by), None)

    def forget_after(self, passage: Passage) -> None:
        """Drops what was entered after `passage`, which advanced, but for what goes along; adds it."""
        live = [each for ref in self._live if (each := ref()) is not None]
        place = live.index(passage) if passage in live else len(live)
        beside = [
            each for each in live[place + 1 :] if each.advanced == self.step and each.earlier == passage.earlier >= 0
        ]
        self._keep([weakref.ref(each) for each in (*live[:place], *beside, passage)])

    def _keep(self, live: list[weakref.ref[Passage]]) -> None:
        self._live = live
        self.newest = live[-1] if live else _nobody

    def begin_step(self) -> int | None:
        """The fewest batches left of the iterators that advanced last; once per `accumulate`.

        One that was entered since the last call counts alone: it runs inside of the others. None: nobody
        knows, or none has advanced since and none has ended, or ranks may end at different batches.
        """
        live = [passage for ref in self._live if (passage := ref()) is not None and passage.advanced >= 0]
        is_new, self.step = bool(live) and live[-1].advanced == self.step, self.step + 1
        if len(live) > 1:
            latest = live[-1].advanced  # what was entered after the one that advances is forgotten
            live = live[-1:] if live[-1].entered == latest else [each for each in live if each.advanced == latest]
        left = [n if n < each.ahead else max(n, self.lookahead) for each in live if (n := each.remaining) is not None]
        fewest = min(left, default=None)
        return None if self.joining or not (is_new or fewest == 0) else fewest

    def current_rows(self) -> Rows | None:
        """The rows of the batch for metrics; None when no prepared loader counted any, or `PASSED`."""
        rows = next((passage.rows for ref in reversed(self._live) if (passage := ref()) is not None), self.latest)
        return PASSED if rows is not None and rows is self.passed and rows.real != rows.rows else rows

    def current_drawn(self) -> list[tuple[Drawn, Rows | None]]:
        """The samples that a step may use: an entry per live iteration, else the last batch's."""
        drawn = [(passage.drawn, passage.rows) for ref in self._live if (passage := ref()) is not None]
        return drawn or [(self.latest_drawn, self.latest)]


def _nobody() -> None:
    """Stands for a dead reference: nobody is the newest."""


class Positions(NamedTuple):
    """Consecutive samples of an epoch, numbered from 0 over all ranks: a batch of a stream."""

    first: int
    size: int
