"""Prepared loaders: copies of the user's loaders that place their batches and report them to the feed.

Here is what every loader component shares, and the core's own loader for a world of one:

- a `Source` says what one iteration reads: index batches, how many are left after each, and how many rows are real;
- `prepare_copy` makes a copy of a loader that reads from a source. The copy keeps class, attributes and worker settings;
  the user's loader is not changed;
- `PreparedLoader` iterates. torch's own machinery fetches the batches; an exact `DataLoader` without workers, pinning and
  a collate function of its own takes a bare loop instead, whose batches and random draws equal torch's.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

import torch
from torch.autograd import profiler
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    default_collate,
)

from accel_core.dressing import dressed_class
from accel_core.feed import Feed, Rows
from accel_core.fetching import fetching
from accel_core.tree import to_device

T = TypeVar("T")
Read = tuple[Any, "int | None", "Rows | None"]
"""An index batch (or one index), how many follow it on this rank (None: unknown), and its rows (None: not countable)."""

_TRUSTED = (SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


class Opening:
    """One iteration over a source: its reads, and what was noted of those that torch has taken but not yet delivered."""

    __slots__ = ("__weakref__", "notes", "reads")

    def __init__(self, reads: Iterator[Read]) -> None:
        self.reads = reads
        self.notes: deque[tuple[int | None, Rows | None]] = deque()

    def start(self) -> None:
        """The iterator is advanced for the first time. An iterator that never is has not begun an epoch."""


class Source(Protocol):
    """What a prepared loader reads."""

    def open(self, ahead: int) -> Opening:
        """Begins an iteration. `ahead`: how many batches to look ahead where the length is not certain."""

    def __len__(self) -> int: ...


class Outlet:
    """Where a prepared loader reports, and the device on which it puts batches (None: where they are).

    The feed belongs to an Accelerator of this process, so copies of a loader share it. A pickled loader reports to a feed
    of its own.
    """

    def __init__(self, feed: Feed, device: torch.device | None) -> None:
        self.feed = feed
        self.device = device

    def __deepcopy__(self, memo: dict[int, Any]) -> Outlet:
        return self

    def __reduce__(self) -> tuple[Callable[..., Outlet], tuple[Any, ...]]:
        return _lonely_outlet, (self.feed.lookahead, self.device)


class IndexBatches:
    """Stands where the user's batch sampler stood, and hands torch what the source reads.

    Other attributes are those of the user's batch sampler.

    Args:
        strict: whether each batch has to be matched with its index batch, because it may be padded.
    """

    def __init__(self, source: Source, outlet: Outlet, original: Any, strict: bool) -> None:
        self.source = source
        self.outlet = outlet
        self.original = original
        self.strict = strict
        self.opened: Opening | None = None

    def open(self) -> Opening:
        """Begins an iteration of the source."""
        return self.source.open(self.outlet.feed.lookahead)

    def take(self) -> Opening | None:
        """The opening that torch asked for since the last call: it asks when its iterator is made."""
        opened, self.opened = self.opened, None
        return opened

    def __iter__(self) -> Iterator[Any]:
        self.opened = None  # with workers, torch asks twice and drops what it got first
        self.opened = opening = self.open()
        # torch may keep this iterator for as long as its workers live; the opening must not live as long.
        return _noted(opening.reads, opening.notes)

    def __len__(self) -> int:
        return len(self.source)

    def __getattr__(self, name: str) -> Any:
        if name == "original" or name.startswith("__"):  # a copy that is being made has no attributes yet
            raise AttributeError(name)
        return getattr(self.original, name)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "opened": None}


if TYPE_CHECKING:
    _Base = DataLoader[Any]
else:
    _Base = object


class PreparedLoader(_Base):
    """The overrides of a prepared loader, put before the user's class in a subclass of both.

    A copy or deep copy is a prepared loader that reports to the same feed. A pickle is a prepared loader too, at the same
    epoch, but it reports to a feed of its own, for the Accelerator is not pickled with it. Running workers stay behind.
    """

    _accel_outlet: Outlet
    _accel_indices: IndexBatches

    def __iter__(self) -> Any:
        indices, outlet = self._accel_indices, self._accel_outlet
        if _is_plain(self):
            opening = indices.open()
            _draw_base_seed(self.generator)
            return _plain_batches(self.dataset, opening, outlet)
        indices.opened = None
        inner = super().__iter__()
        rows_known = self.in_order or self.num_workers == 0
        if indices.strict or not (_iterates_by_itself(self) or isinstance(self.dataset, IterableDataset)):
            return _matched_batches(inner, indices, indices.take(), outlet, rows_known)
        return _batches_looked_ahead(inner, indices, indices.take(), outlet)

    def __getstate__(self) -> Any:
        inherited = getattr(super(), "__getstate__", None)  # object has it since Python 3.11
        state = self.__dict__ if inherited is None else inherited()
        return {**state, "_iterator": None} if isinstance(state, dict) and "_iterator" in state else state

    def __reduce_ex__(self, protocol: Any) -> Any:
        overrides, original = type(self).__bases__
        return _blank, (overrides, original), self.__getstate__()


def prepare_local_loader(loader: DataLoader[Any], feed: Feed, device: torch.device | None) -> DataLoader[Any]:
    """A copy of `loader` that puts its batches on `device` and reports them to `feed`: all that a world of one needs.

    Any `DataLoader` will do: with a batch sampler, without batching (`batch_size=None`), over an `IterableDataset`, of a
    subclass. Where the number of batches is not certain (iterable sets, samplers of the user's own, subclasses that
    iterate in their own way), `feed.lookahead` batches are looked ahead: in the sampler where there is one, else in the
    data.

    Raises:
        ValueError: if the loader is a prepared one.
    """
    sampler = index_sampler(loader)
    iterable = isinstance(loader.dataset, IterableDataset)
    source = LocalSource(sampler, batched=loader.batch_sampler is not None, endless=iterable)
    return prepare_copy(loader, PreparedLoader, source, Outlet(feed, device))


def prepare_copy(
    loader: DataLoader[Any],
    overrides: type[PreparedLoader],
    source: Source,
    outlet: Outlet,
    strict: bool = False,
    **attributes: Any,
) -> DataLoader[Any]:
    """A copy of `loader` that reads from `source`, of a subclass of `overrides` and the loader's own class.

    Args:
        strict: batches may be padded, so each must be matched with its index batch: a loader class with an `__iter__` of
            its own then has to yield exactly one batch for each one that it takes from `super().__iter__()`.
        attributes: what else the copy is to have.

    Raises:
        ValueError: if the loader is a prepared one.
    """
    if isinstance(loader, PreparedLoader):
        raise ValueError(
            f"This {type(loader).__name__} has been prepared already; prepared again, it would be sharded twice. Pass the "
            f"loader that you built, or go on with the one that prepare() returned."
        )
    place = "sampler" if loader.batch_sampler is None else "batch_sampler"
    indices = IndexBatches(source, outlet, index_sampler(loader), strict)
    twin = cast("DataLoader[Any]", _blank(overrides, type(loader)))
    # Not through setattr: torch forbids to set its attributes after the construction.
    twin.__dict__.update(copy.copy(loader).__dict__)
    twin.__dict__.update({"_iterator": None, "_accel_outlet": outlet, "_accel_indices": indices, place: indices})
    twin.__dict__.update(attributes)
    return twin


def index_sampler(loader: DataLoader[Any]) -> Any:
    """What the loader draws from: its batch sampler, or its sampler if it does not make batches."""
    return loader.sampler if loader.batch_sampler is None else loader.batch_sampler


def length_of(obj: Any) -> int | None:
    """`len(obj)`, None if it has none."""
    try:
        return len(obj)
    except (TypeError, NotImplementedError):
        return None


def looked_ahead(items: Iterable[T], ahead: int, total: int | None = None) -> Iterator[tuple[T, int]]:
    """Each item with the number of those that follow it: exact for the last `ahead` items.

    Before these, it is what `total` says, or `ahead` if that is larger: a total that turns out wrong does no harm.
    """
    waiting: deque[T] = deque()
    passed = 0
    for item in items:
        waiting.append(item)
        if len(waiting) > ahead:
            passed += 1
            yield waiting.popleft(), ahead if total is None else max(ahead, total - passed)
    while waiting:
        item = waiting.popleft()
        yield item, len(waiting)


class LocalSource:
    """What one process reads: everything, in the order of the loader's own sampler.

    Args:
        sampler: a batch sampler, or a sampler of single indices.
        batched: which of the two it is.
        endless: the indices mean nothing, because the set is iterable; only the data will tell the end.
    """

    def __init__(self, sampler: Any, *, batched: bool, endless: bool) -> None:
        self.sampler = sampler
        self.batched = batched
        self.endless = endless

    def open(self, ahead: int) -> Opening:
        """Begins an iteration."""
        return Opening(local_reads(self.sampler, ahead, batched=self.batched, endless=self.endless))

    def __len__(self) -> int:
        return len(self.sampler)


def local_reads(sampler: Any, ahead: int, *, batched: bool, endless: bool) -> Iterator[Read]:
    """What `sampler` yields, as reads. See `LocalSource`."""
    if endless:
        for index in sampler:
            yield index, None, None
        return
    total = length_of(sampler)
    certain = type(sampler) is BatchSampler and type(sampler.sampler) in _TRUSTED
    if certain and total is not None:
        stream = _counted_down(sampler, total)
    else:
        stream = looked_ahead(map(_settled, sampler) if batched else sampler, ahead, total)
    rows: Rows | None = None
    for index, remaining in stream:
        if batched and (rows is None or len(index) != rows.rows):
            rows = Rows(len(index), len(index))
        yield index, remaining, rows


def _settled(batch: Any) -> Any:
    """An index batch that can wait its turn: the sampler may fill the same list again, or yield a generator."""
    return list(batch) if type(batch) is list or not hasattr(batch, "__len__") else batch


def _counted_down(items: Iterable[T], total: int) -> Iterator[tuple[T, int]]:
    for item in items:
        total -= 1
        yield item, total


def _noted(reads: Iterator[Read], notes: deque[tuple[int | None, Rows | None]]) -> Iterator[Any]:
    for index, remaining, rows in reads:
        notes.append((remaining, rows))
        yield index


def _lonely_outlet(lookahead: int, device: torch.device | None) -> Outlet:
    return Outlet(Feed(lookahead), device)


def _blank(overrides: type, original: type) -> Any:
    """A dressed instance without attributes. (A loader cannot be dressed in place: its class has another layout.)"""
    made: Any = dressed_class(original, overrides)
    return made.__new__(made)


def _iterates_by_itself(loader: DataLoader[Any]) -> bool:
    original: Any = type(loader).__bases__[-1]
    return original.__iter__ is not DataLoader.__iter__


def _matched_batches(
    inner: Iterable[Any], indices: IndexBatches, opening: Opening | None, outlet: Outlet, rows_known: bool
) -> Iterator[Any]:
    """torch's batches, each with what was noted of its index batch; torch draws index batches before they are due."""
    passage = outlet.feed.enter()
    remaining: int | None = 0
    if opening is not None:
        opening.start()
    try:
        for batch in inner:
            if opening is None:  # the user's __iter__ is a generator, and has only now asked for torch's iterator
                opening = indices.take()
                if opening is not None:
                    opening.start()
            if opening is None or not opening.notes:
                raise RuntimeError(_unmatched("more batches than"))
            remaining, rows = opening.notes.popleft()
            placed = batch if outlet.device is None else to_device(batch, outlet.device)
            passage.advance(remaining, rows if rows_known else None)
            yield placed
        if remaining or (opening is not None and opening.notes):
            raise RuntimeError(_unmatched("fewer batches than"))
    finally:
        passage.leave()


def _unmatched(how: str) -> str:
    return (
        f"The __iter__ of this DataLoader subclass yielded {how} it takes from super().__iter__(). Which of them are padded "
        f"to fill the last global batch cannot be told. Yield one batch for each (to end early, break in your loop), or "
        f"leave the loader out of prepare()."
    )


def _batches_looked_ahead(
    inner: Iterable[Any], indices: IndexBatches, opening: Opening | None, outlet: Outlet
) -> Iterator[Any]:
    """Batches of which only the data tell how many there are."""
    passage = outlet.feed.enter()
    if opening is not None:
        opening.start()
    try:
        for batch, remaining in looked_ahead(inner, outlet.feed.lookahead):
            if opening is None:
                opening = indices.take()
                if opening is not None:
                    opening.start()
            if opening is not None:
                opening.notes.clear()
            placed = batch if outlet.device is None else to_device(batch, outlet.device)
            passage.advance(remaining, None)
            yield placed
    finally:
        passage.leave()


def _is_plain(loader: DataLoader[Any]) -> bool:
    """Whether torch's iterator would do nothing but fetch and collate."""
    return (
        type(loader).__bases__[-1] is DataLoader
        and loader.num_workers == 0
        and not loader.pin_memory
        and not loader.timeout
        and loader.batch_sampler is not None
        and loader.collate_fn is default_collate
        and not isinstance(loader.dataset, (IterableDataset, torch.utils.data.MapDataPipe))
    )


def _draw_base_seed(generator: torch.Generator | None) -> None:
    """torch draws the base of its workers' seeds even when there are none; the streams that follow depend on it."""
    torch.empty((), dtype=torch.int64).random_(generator=generator)


def _plain_batches(dataset: Any, opening: Opening, outlet: Outlet) -> Iterator[Any]:
    fetch = fetching(dataset)
    device = outlet.device
    passage = outlet.feed.enter()
    opening.start()
    advance = passage.advance
    try:
        for indices, remaining, rows in opening.reads:
            if profiler._is_profiler_enabled:  # kept by torch as a plain flag for checks like this one
                with profiler.record_function("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"):
                    batch = fetch(indices)
            else:
                batch = fetch(indices)
            if device is not None:
                batch = to_device(batch, device)
            advance(remaining, rows)
            yield batch
    finally:
        passage.leave()
