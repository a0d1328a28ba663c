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
from itertools import islice
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
from accel_core.failures import announce
from accel_core.feed import Feed, Rows
from accel_core.fetching import fetching
from accel_core.tree import to_device

T = TypeVar("T")
Note = tuple["int | None", "Rows | None", int]
"""Of a batch: how many follow it on this rank (None: unknown), its rows (None: not countable), and how many samples all
ranks have read of the epoch once it is yielded."""

Read = tuple[Any, "int | None", "Rows | None", int]
"""An index batch (or one index), and its note."""

_TRUSTED = (SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


class Progress:
    """How far an iteration has come: what was yielded of its epoch, not what was fetched.

    Args:
        epoch: which one.
        samples: samples of the epoch, over all ranks, that are behind it.
    """

    __slots__ = ("epoch", "finished", "samples")

    def __init__(self, epoch: int = 0, samples: int = 0) -> None:
        self.epoch = epoch
        self.samples = samples
        self.finished = False


class Opening:
    """One iteration over a source: its reads, and what was noted of those that torch has taken but not yet delivered."""

    __slots__ = ("__weakref__", "notes", "progress", "reads")

    def __init__(self, reads: Iterator[Read], progress: Progress | None = None) -> None:
        self.reads = reads
        self.notes: deque[Note] = deque()
        self.progress = progress or Progress()

    def start(self) -> None:
        """The iterator is advanced for the first time. An iterator that never is has not begun an epoch."""


class Source(Protocol):
    """What a prepared loader reads.

    Attributes:
        skipped: batches of this rank that every iteration leaves out at its beginning.
    """

    skipped: int

    def open(self, feed: Feed) -> Opening:
        """Begins an iteration. Where the length is not certain, it looks `feed.lookahead` batches ahead."""

    def __len__(self) -> int: ...


class Outlet:
    """Where a prepared loader reports, and the device on which it puts batches (None: where they are).

    The feed belongs to an Accelerator of this process, so copies of a loader share it. A pickled loader reports to a feed
    of its own.

    Args:
        non_blocking: do not wait for copies out of pinned memory.
    """

    def __init__(self, feed: Feed, device: torch.device | None, non_blocking: bool = False) -> None:
        self.feed = feed
        self.device = device
        self.non_blocking = non_blocking

    def placed(self, batch: Any) -> Any:
        """The batch, on the device."""
        return batch if self.device is None else to_device(batch, self.device, self.non_blocking)

    def __deepcopy__(self, memo: dict[int, Any]) -> Outlet:
        return self

    def __reduce__(self) -> tuple[Callable[..., Outlet], tuple[Any, ...]]:
        return _lonely_outlet, (self.feed.lookahead, self.device, self.non_blocking)


class IndexBatches:
    """Stands where the user's batch sampler stood, and hands torch what the source reads.

    Other attributes are those of the user's batch sampler.

    Args:
        strict: whether each batch has to be matched with its index batch, because it may be padded.

    Attributes:
        delivering: torch's latest iterator, where the loader's class iterates in its own way.
        bypassed: whether that class has yielded batches without asking torch for any.
    """

    def __init__(self, source: Source, outlet: Outlet, original: Any, strict: bool) -> None:
        self.source = source
        self.outlet = outlet
        self.original = original
        self.strict = strict
        self.opened: Opening | None = None
        self.delivering: Delivering | None = None
        self.bypassed = False

    def open(self) -> Opening:
        """Begins an iteration of the source."""
        return self.source.open(self.outlet.feed)

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
        return {**self.__dict__, "opened": None, "delivering": None}


class Delivering:
    """torch's iterator, with a count of the batches that it has delivered: some loader classes join them, or leave some out."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.delivered = 0

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Any:
        batch = next(self.inner)
        self.delivered += 1
        return batch

    def __len__(self) -> int:
        return len(self.inner)

    def _reset(self, *arguments: Any, **options: Any) -> None:
        """torch keeps the iterator with its workers, and begins anew with it."""
        self.delivered = 0
        self.inner._reset(*arguments, **options)

    def __getattr__(self, name: str) -> Any:
        if name == "inner":
            raise AttributeError(name)
        return getattr(self.inner, name)


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
        inner: Any = super().__iter__()
        if isinstance(self.dataset, IterableDataset):  # its batches have no indices by which to leave them out
            inner = islice(inner, indices.source.skipped, None)
        rows_known = self.in_order or self.num_workers == 0
        if indices.strict or not (_iterates_by_itself(self) or isinstance(self.dataset, IterableDataset)):
            return _matched_batches(inner, indices, indices.take(), outlet, rows_known)
        return _batches_looked_ahead(inner, indices, indices.take(), outlet)

    def _get_iterator(self) -> Any:
        inner = super()._get_iterator()
        if not _iterates_by_itself(self):
            return inner
        self._accel_indices.delivering = Delivering(inner)
        return self._accel_indices.delivering

    def behind(self, batches: int) -> PreparedLoader:
        """A copy of which every iteration leaves out so many more batches of this rank.

        Raises:
            ValueError: if the number is negative, or no whole number.
        """
        source = source_behind(self._accel_indices.source, batches)
        twin = copy.copy(self)
        twin.__dict__.update(self._reading_from(source))
        return twin

    def _reading_from(self, source: Source) -> dict[str, Any]:
        """The attributes by which a copy reads from another source."""
        indices = copy.copy(self._accel_indices)
        indices.source = source
        places = [name for name in ("batch_sampler", "sampler") if self.__dict__[name] is self._accel_indices]
        return dict.fromkeys(["_accel_indices", *places], indices)

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
    """A copy of `loader` that reads index batches from `source`, of a subclass of `overrides` and the loader's own class.

    Args:
        strict: batches may be padded, so each must be matched with its index batch: a loader class with an `__iter__` of
            its own then has to yield exactly one batch for each one that it takes from `super().__iter__()`.
        attributes: what else the copy is to have.

    Raises:
        ValueError: if the loader is a prepared one.
    """
    return dressed_copy(loader, overrides, **reading(loader, source, outlet, strict), **attributes)


def reading(loader: DataLoader[Any], source: Source, outlet: Outlet, strict: bool = False) -> dict[str, Any]:
    """The attributes by which a copy of `loader` reads index batches from `source`. See `prepare_copy`."""
    place = "sampler" if loader.batch_sampler is None else "batch_sampler"
    indices = IndexBatches(source, outlet, index_sampler(loader), strict)
    return {"_accel_outlet": outlet, "_accel_indices": indices, place: indices}


def dressed_copy(loader: DataLoader[Any], overrides: type[PreparedLoader], **attributes: Any) -> DataLoader[Any]:
    """A copy of `loader`, of a subclass of `overrides` and the loader's own class, with these attributes.

    Raises:
        ValueError: if the loader is a prepared one.
    """
    if isinstance(loader, PreparedLoader):
        raise ValueError(
            f"This {type(loader).__name__} has been prepared already; prepared again, it would be sharded twice. Pass the "
            f"loader that you built, or go on with the one that prepare() returned."
        )
    twin = cast("DataLoader[Any]", _blank(overrides, type(loader)))
    # Not through setattr: torch forbids to set its attributes after the construction.
    twin.__dict__.update(copy.copy(loader).__dict__)
    twin.__dict__.update({"_iterator": None, **attributes})
    return twin


def source_behind(source: T, batches: int) -> T:
    """A copy of a source of which every iteration leaves out so many more batches."""
    if type(batches) is not int or batches < 0:
        raise ValueError(
            f"skip_first_batches(num_batches={batches!r}): expected how many batches are left out, a whole number of at "
            f"least 0."
        )
    twin: Any = copy.copy(source)
    twin.skipped += batches
    return cast("T", twin)


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

    Before these, it is what `total` says, or `ahead` if that is larger: a total that turns out wrong does no harm. An error of
    `items` is raised once all items before it have been yielded; none of these is the last.
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
        self.skipped = 0

    def open(self, feed: Feed) -> Opening:
        """Begins an iteration."""
        reads = local_reads(self.sampler, feed.lookahead, batched=self.batched, endless=self.endless)
        return Opening(reads if self.endless else islice(reads, self.skipped, None))

    def __len__(self) -> int:
        return max(len(self.sampler) - self.skipped, 0)


def local_reads(sampler: Any, ahead: int, *, batched: bool, endless: bool) -> Iterator[Read]:
    """What `sampler` yields, as reads. See `LocalSource`."""
    if endless:
        for index in sampler:
            yield index, None, None, 0
        return
    total = length_of(sampler)
    certain = type(sampler) is BatchSampler and type(sampler.sampler) in _TRUSTED
    if certain and total is not None:
        stream = _counted_down(sampler, total)
    else:
        stream = looked_ahead(map(_settled, sampler) if batched else sampler, ahead, total)
    rows: Rows | None = None
    samples = 0
    for index, remaining in stream:
        if batched and (rows is None or len(index) != rows.rows):
            rows = Rows(len(index), len(index))
        samples += len(index) if batched else 1
        yield index, remaining, rows, samples


def _settled(batch: Any) -> Any:
    """An index batch that can wait its turn: the sampler may fill the same list again, or yield a generator."""
    return list(batch) if type(batch) is list or not hasattr(batch, "__len__") else batch


def _counted_down(items: Iterable[T], total: int) -> Iterator[tuple[T, int]]:
    for item in items:
        total -= 1
        yield item, total


def _noted(reads: Iterator[Read], notes: deque[Note]) -> Iterator[Any]:
    for index, remaining, rows, samples in reads:
        notes.append((remaining, rows, samples))
        yield index


def _lonely_outlet(lookahead: int, device: torch.device | None, non_blocking: bool) -> Outlet:
    return Outlet(Feed(lookahead), device, non_blocking)


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
            remaining, rows, samples = opening.notes.popleft()
            placed = outlet.placed(batch)
            passage.advance(remaining, rows if rows_known else None)
            opening.progress.samples = samples
            yield placed
        if remaining or (opening is not None and opening.notes):
            raise RuntimeError(_unmatched("fewer batches than"))
        if opening is not None:
            opening.progress.finished = True
    except Exception as error:
        announce(error)
        raise
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
        arriving = _with_samples(inner, indices, opening)
        for (batch, found, samples), remaining in looked_ahead(arriving, outlet.feed.lookahead):
            if opening is None and found is not None:
                opening = found
                opening.start()
            placed = outlet.placed(batch)
            passage.advance(remaining, None)
            if opening is not None:
                opening.progress.samples = samples
            yield placed
        if opening is not None:
            opening.progress.finished = True
    except Exception as error:
        announce(error)
        raise
    finally:
        passage.leave()


def _with_samples(
    inner: Iterable[Any], indices: IndexBatches, opening: Opening | None
) -> Iterator[tuple[Any, Opening | None, int]]:
    """The batches of a loader class that iterates in its own way, each with the samples that torch has delivered for it."""
    taken = samples = 0
    for batch in inner:
        opening = opening or indices.take()  # the user's __iter__ may have asked for torch's iterator only now
        delivering = indices.delivering
        if opening is None:
            indices.bypassed = True
        elif delivering is None:
            opening.notes.clear()
        else:
            while taken < delivering.delivered and opening.notes:
                samples = opening.notes.popleft()[2]
                taken += 1
        yield batch, opening, samples


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
    device, non_blocking = outlet.device, outlet.non_blocking
    progress = opening.progress
    passage = outlet.feed.enter()
    opening.start()
    advance = passage.advance
    try:
        for indices, remaining, rows, samples in opening.reads:
            if profiler._is_profiler_enabled:  # kept by torch as a plain flag for checks like this one
                with profiler.record_function("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"):
                    batch = fetch(indices)
            else:
                batch = fetch(indices)
            if device is not None:
                batch = to_device(batch, device, non_blocking)
            advance(remaining, rows)
            progress.samples = samples
            yield batch
        progress.finished = True
    except Exception as error:
        announce(error)
        raise
    finally:
        passage.leave()
