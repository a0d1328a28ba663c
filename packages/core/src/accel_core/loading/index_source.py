"""Reads of a loader's iteration: index batches with notes of positions; batch streams."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import count, islice
from typing import Any, Protocol, TypeVar, cast

from torch.utils import data
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from accel_core.contract.loader_progress import Feed, Rows

T = TypeVar("T")
IndexRead = tuple[Any, "int | None", "Rows | None", int]
"""An index batch (or one index), and of it: how many follow on this rank (None: unknown), its rows (None: not
countable), and how many samples all ranks have read of the epoch once it is yielded."""

_TRUSTED = (data.SequentialSampler, data.RandomSampler, data.SubsetRandomSampler, data.WeightedRandomSampler)


@dataclass(slots=True, eq=False)
class SourceProgress:
    """Progress in an epoch, in samples over all ranks: of those yielded, not fetched."""

    epoch: int = 0
    samples: int = 0
    finished: bool = False


@dataclass(eq=False)
class SourceIteration:
    """One iteration over a source: its reads, and in `notes` those not yet delivered by torch.

    `before` is what a position needs until the iteration is advanced, as it was before torch asked
    for it: to open one may draw random numbers.
    """

    reads: Iterator[IndexRead]
    progress: SourceProgress = field(default_factory=SourceProgress)
    before: dict[str, Any] = field(default_factory=dict)
    notes: deque[IndexRead] = field(default_factory=deque)

    def start(self) -> None:
        """The iterator is advanced for the first time; before that it has not begun an epoch."""


class IndexSource(Protocol):
    """The source of a prepared loader's index batches; iterations leave out the first `skipped`."""

    skipped: int

    def open(self, feed: Feed) -> SourceIteration:
        """Begins an iteration; without a certain length it looks `feed.lookahead` batches ahead."""

    def __len__(self) -> int: ...


@dataclass(eq=False)
class LocalSource:
    """The source for a single process: all index batches, in the order of the loader's sampler."""

    sampler: Any
    batched: bool  # whether that gives batches, or single indices
    endless: bool  # whether they mean nothing, as the set is iterable
    skipped: int = 0

    def open(self, feed: Feed) -> SourceIteration:
        """Begins an iteration."""
        if self.endless:
            return SourceIteration((index, None, None, 0) for index in self.sampler)
        return SourceIteration(islice(self._reads(feed.lookahead), self.skipped, None))

    def _reads(self, ahead: int) -> Iterator[IndexRead]:
        sampler, batched, total = self.sampler, self.batched, length_of(self.sampler)
        if type(sampler) is BatchSampler and type(sampler.sampler) in _TRUSTED and total is not None:
            stream: Iterator[tuple[Any, int]] = zip(sampler, count(total - 1, -1), strict=False)
        else:
            stream = looked_ahead(map(_settled, sampler) if batched else sampler, ahead, total)
        rows: Rows | None = None
        samples = 0
        for index, remaining in stream:
            if batched and (rows is None or len(index) != rows.rows):
                rows = Rows(len(index), len(index))
            samples += len(index) if batched else 1
            yield index, remaining, rows, samples

    def __len__(self) -> int:
        return max(len(self.sampler) - self.skipped, 0)


def source_after(source: T, batches: int) -> T:
    """A copy of a source of which every iteration leaves out so many more batches."""
    if type(batches) is not int or batches < 0:
        raise ValueError(f"skip_first_batches(num_batches={batches!r}): expected how many batches are left out, >= 0.")
    twin: Any = copy.copy(source)
    twin.skipped += batches
    return cast("T", twin)


def length_of(obj: Any) -> int | None:
    """`len(obj)`, None if it has none."""
    try:
        return len(obj)
    except (TypeError, NotImplementedError):
        return None


def looked_ahead(items: Iterable[T], ahead: int, total: int | None = None) -> Iterator[tuple[T, int]]:
    """Each item with the number of those that follow it: exact for the last `ahead` items.

    Before these, it is what `total` says, or `ahead` if that is larger. An error of `items` is
    raised once all items before it have been yielded; none of these is the last.
    """
    waiting: deque[T] = deque()
    passed = 0
    try:
        for item in items:
            waiting.append(item)
            if len(waiting) > ahead:
                passed += 1
                yield waiting.popleft(), ahead if total is None else max(ahead, total - passed)
    except Exception:
        while waiting:
            yield waiting.popleft(), ahead
        raise
    while waiting:
        item = waiting.popleft()
        yield item, len(waiting)


def _settled(batch: Any) -> Any:
    """An index batch that can wait: a list is copied, a generator drained."""
    return list(batch) if type(batch) is list or not hasattr(batch, "__len__") else batch


class BatchStream(IterableDataset[Any]):
    """A dataset of the batches of an iterable, with the iterable's attributes and state."""

    def __init__(self, batches: Any) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)

    def __getattr__(self, name: str) -> Any:
        if name == "batches" or name.startswith("__"):  # a copy that is being made has no attributes yet
            raise AttributeError(name)
        return getattr(self.batches, name)


def has_state(obj: object) -> bool:
    """Whether an object gives its state, and takes it back."""
    return all(callable(getattr(obj, name, None)) for name in ("state_dict", "load_state_dict"))


def is_batch_stream(obj: object) -> bool:
    """Whether `obj` is an iterable that keeps its own position."""
    return hasattr(type(obj), "__iter__") and has_state(obj)


def as_data_loader(loader: Any) -> DataLoader[Any]:
    """A `DataLoader` as it is; a stream of batches as the dataset of one. Else `TypeError`."""
    if isinstance(loader, DataLoader):
        return loader
    if not is_batch_stream(loader):
        raise TypeError(
            f"prepare_data_loader() was given a {type(loader).__name__}, expected a torch.utils.data.DataLoader, or an "
            f"iterable of batches with state_dict() and load_state_dict(). prepare() takes objects of any kind."
        )
    return DataLoader(BatchStream(loader), batch_size=None)
