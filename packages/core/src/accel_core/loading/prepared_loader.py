"""Prepared loaders: copies of loaders that place their batches and report them to the feed.

torch's own machinery fetches the batches; an exact `DataLoader` without workers, pinning and a
collate function of its own takes a bare loop, whose batches and random draws equal torch's.
"""

from __future__ import annotations

import copy
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset

from accel_core.base.class_override import overridden_class
from accel_core.base.nested import to_device
from accel_core.contract.loader_progress import Feed, Passage, Rows, RunningLoader
from accel_core.loading.fast_fetch import fetches_plainly, plain_batches
from accel_core.loading.index_source import (
    IndexRead,
    IndexSource,
    LocalSource,
    SourceIteration,
    looked_ahead,
    source_after,
)
from accel_core.processes import random_state


@dataclass(eq=False)
class Outlet:
    """The target of a loader's batches. A pickled one has a feed of its own, a copy the same."""

    feed: Feed
    device: torch.device | None  # None: they stay
    non_blocking: bool = False  # whether no copies are waited for; those out of pinned memory never are

    def placed(self, batch: Any, rows: Rows | None, remaining: int | None) -> tuple[Any, Rows | None]:
        """The batch on the device, and its rows there: a strategy may pad it."""
        if self.device is None:
            return batch, rows
        if (place := self.feed.place_batch) is not None:
            return place(batch, rows, remaining, self)
        return to_device(batch, self.device, self.non_blocking), rows

    @contextmanager
    def passage(self) -> Iterator[Passage]:
        """One iteration, from its first batch to its end or death."""
        passage, ended = self.feed.enter(self), False
        try:
            yield passage
            ended = True
        finally:
            passage.leave(ended=ended)

    def __deepcopy__(self, memo: dict[int, Any]) -> Outlet:
        return self

    def __reduce__(self) -> tuple[Callable[..., Outlet], tuple[Any, ...]]:
        return Outlet, (Feed(self.feed.lookahead), self.device, self.non_blocking)


@dataclass(eq=False)
class IndexBatches:
    """The batch sampler's replacement, with its attributes: hands torch the source's reads."""

    source: IndexSource
    outlet: Outlet
    original: Any
    strict: bool  # whether each batch has to be matched with its index batch, because it may be padded
    opened: SourceIteration | None = None
    delivered: list[int] | None = None  # the count of torch's latest iterator, if the loader's class has its own way
    bypassed: bool = False  # whether that class has yielded batches without asking torch for any
    _restored: partial[Iterator[IndexRead]] | None = None

    def begin(self) -> None:
        """Prepares for an iterator; one that goes on in an epoch leaves random streams alone."""
        # What torch and samplers draw to begin an epoch was drawn before the streams were saved; so was, between two epochs,
        # what torch draws to start workers that persist.
        self.opened = self._restored = None
        resumes, device = getattr(self.source, "resumes", False), self.outlet.device
        if resumes or getattr(self.source, "restarts_workers", False):
            before = random_state.capture_random_state(device)
            self._restored = partial(random_state.restored_behind, int(resumes), before=before, device=device)

    def open(self) -> SourceIteration:
        """Begins an iteration of the source."""
        opening = self.source.open(self.outlet.feed)
        if self._restored is not None:
            opening.reads = self._restored(opening.reads)
        return opening

    def take(self, start: bool = True) -> SourceIteration | None:
        """The opening since the last call: torch asks for one when its iterator is made."""
        opened, self.opened = self.opened, None
        if opened is not None and start:
            opened.start()
        return opened

    def __iter__(self) -> Iterator[Any]:
        before = None if self.opened is None else self.opened.before
        self.opened = None  # with workers, torch asks twice and drops what it got first
        self.opened = opening = self.open()
        opening.before = opening.before if before is None else before
        # torch may keep this iterator for as long as its workers live; the opening must not live as long.
        return _noted(opening.reads, opening.notes)

    def __len__(self) -> int:
        return len(self.source)

    @property
    def batch_sampler(self) -> Any:
        """The user's sampler that stands behind this one."""
        return self.original

    def __getattr__(self, name: str) -> Any:
        if name == "original" or name.startswith("__"):  # a copy that is being made has no attributes yet
            raise AttributeError(name)
        return getattr(self.original, name)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "opened": None, "delivered": None, "_restored": None}


class CountingIterator:
    """torch's iterator, with a count of batches delivered: loader classes may join or drop some."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.count = [0]  # in a list: whoever reads it need not hold on to the iterator

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Any:
        batch = next(self.inner)
        self.count[0] += 1
        return batch

    def __len__(self) -> int:
        return len(self.inner)

    def _reset(self, *arguments: Any, **options: Any) -> None:
        """torch keeps the iterator with its workers, and begins anew with it."""
        self.count[0] = 0
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
    """The overrides of a prepared loader, put before the user's class in a subclass of both."""

    _accel_outlet: Outlet
    _accel_indices: IndexBatches

    @property
    def running(self) -> RunningLoader | None:
        """The present iteration of this loader, and its batch; None outside of loops over it."""
        passage = self._accel_outlet.feed.passage_of(self._accel_outlet)
        return None if passage is None else RunningLoader(self, passage.remaining, passage.rows)

    def __iter__(self) -> Any:
        indices, outlet = self._accel_indices, self._accel_outlet
        indices.begin()
        if fetches_plainly(self):
            opening = indices.open()
            # As torch does for the seeds of workers even when there are none; the random streams depend on it.
            torch.empty((), dtype=torch.int64).random_(generator=self.generator)
            return plain_batches(self.dataset, opening, outlet)
        inner: Any = super().__iter__()
        if isinstance(self.dataset, IterableDataset):  # its batches have no indices by which to leave them out
            inner = islice(inner, indices.source.skipped, None)
        rows_known = self.in_order or self.num_workers == 0
        if indices.strict or not (_iterates_by_itself(self) or isinstance(self.dataset, IterableDataset)):
            return _matched_batches(inner, indices, indices.take(start=False), outlet, rows_known)
        return _batches_looked_ahead(inner, indices, indices.take(start=False), outlet)

    def _get_iterator(self) -> Any:
        if self.num_workers and dist.is_available() and dist.is_initialized():
            # A thread of the backend may be about to let go of a tensor, and a worker that is forked then waits for ever for the
            # lock of Python that it holds (before CPython 3.13; one worker in some thousands).
            time.sleep(0.005)
        inner = super()._get_iterator()
        if not _iterates_by_itself(self):
            return inner
        counting = CountingIterator(inner)
        self._accel_indices.delivered = counting.count
        return counting

    def behind(self, batches: int) -> PreparedLoader:
        """A copy of which every iteration leaves out so many more batches of this rank."""
        twin = copy.copy(self)
        twin.__dict__.update(self._reading_from(source_after(self._accel_indices.source, batches)))
        return twin

    def _reading_from(self, source: IndexSource) -> dict[str, Any]:
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
    """A copy of `loader` that puts its batches on `device` and reports them to `feed`.

    Where their number is not certain (iterable sets, own samplers), looks `feed.lookahead` ahead.
    """
    iterable = isinstance(loader.dataset, IterableDataset)
    source = LocalSource(index_sampler(loader), batched=loader.batch_sampler is not None, endless=iterable)
    return prepare_copy(loader, PreparedLoader, source, Outlet(feed, device))


def prepare_copy(
    loader: DataLoader[Any],
    overrides: type[PreparedLoader],
    source: IndexSource,
    outlet: Outlet,
    strict: bool = False,
    **attributes: Any,
) -> DataLoader[Any]:
    """A copy of `loader` that reads index batches from `source`, with these `attributes` too.

    With `strict` (batches may be padded) an `__iter__` of its own yields one for each it takes.
    """
    return overridden_copy(loader, overrides, **source_attributes(loader, source, outlet, strict), **attributes)


def source_attributes(
    loader: DataLoader[Any], source: IndexSource, outlet: Outlet, strict: bool = False
) -> dict[str, Any]:
    """The attributes of a copy of `loader` that reads from `source`. See `prepare_copy`."""
    place = "sampler" if loader.batch_sampler is None else "batch_sampler"
    indices = IndexBatches(source, outlet, index_sampler(loader), strict)
    return {"_accel_outlet": outlet, "_accel_indices": indices, place: indices}


def overridden_copy(loader: DataLoader[Any], overrides: type[PreparedLoader], **attributes: Any) -> DataLoader[Any]:
    """A copy of `loader`, of a subclass of `overrides` and its class, with these attributes."""
    if isinstance(loader, PreparedLoader):
        what = f"This {type(loader).__name__} has been prepared already; prepared again, it would be sharded twice."
        raise ValueError(f"{what} Pass the loader that you built, or go on with the one that prepare() returned.")
    twin = cast("DataLoader[Any]", _blank(overrides, type(loader)))
    # Not through setattr: torch forbids to set its attributes after the construction.
    twin.__dict__.update(copy.copy(loader).__dict__)
    twin.__dict__.update({"_iterator": None, **attributes})
    return twin


def index_sampler(loader: DataLoader[Any]) -> Any:
    """The sampler of a loader: its batch sampler, or its sampler if it does not make batches."""
    return loader.sampler if loader.batch_sampler is None else loader.batch_sampler


def _noted(reads: Iterator[IndexRead], notes: deque[IndexRead]) -> Iterator[Any]:
    for read in reads:
        notes.append(read)
        yield read[0]


def _blank(overrides: type, original: type) -> Any:
    """A blank instance of the overridden class; a loader's layout forbids changing its class."""
    made: Any = overridden_class(original, overrides)
    return made.__new__(made)


def _iterates_by_itself(loader: DataLoader[Any]) -> bool:
    original: Any = type(loader).__bases__[-1]
    return original.__iter__ is not DataLoader.__iter__


def _matched_batches(
    inner: Iterable[Any], indices: IndexBatches, opening: SourceIteration | None, outlet: Outlet, rows_known: bool
) -> Iterator[Any]:
    """torch's batches with notes of their index batches, which torch draws before they are due."""
    remaining: int | None = 0
    with outlet.passage() as passage:
        if opening is not None:
            opening.start()
        for batch in inner:
            opening = opening or indices.take()  # a user's __iter__ may have asked for torch's iterator only now
            if opening is None or not opening.notes:
                raise RuntimeError(unmatched_message("more batches than"))
            index, remaining, rows, samples = opening.notes.popleft()
            placed, rows = outlet.placed(batch, rows if rows_known else None, remaining)
            passage.advance(remaining, rows, index if rows_known else None)
            opening.progress.samples = samples
            yield placed
        opening = opening or indices.take()  # there was no batch
        if remaining or (opening is not None and opening.notes):
            raise RuntimeError(unmatched_message("fewer batches than"))
        if opening is not None:
            opening.progress.finished = True


def unmatched_message(how: str) -> str:
    """The message for a loader class that yields `how` it takes, such as "more batches than"."""
    return (
        f"The __iter__ of this DataLoader subclass yielded {how} it takes from super().__iter__(). Which of them are "
        f"padded cannot be told. Yield one batch for each (to end early, break in your loop), or do not prepare it."
    )


def _batches_looked_ahead(
    inner: Iterable[Any], indices: IndexBatches, opening: SourceIteration | None, outlet: Outlet
) -> Iterator[Any]:
    """Batches of which only the data tell how many there are."""
    with outlet.passage() as passage:
        if opening is not None:
            opening.start()
        arriving = _with_samples(inner, indices, opening)
        for (batch, found, samples), remaining in looked_ahead(arriving, outlet.feed.lookahead):
            opening = found
            placed, rows = outlet.placed(batch, None, remaining)
            passage.advance(remaining, rows)
            if opening is not None:
                opening.progress.samples = samples
            yield placed
        opening = opening or indices.take()  # there was no batch
        if opening is not None:
            opening.progress.finished = True


def _with_samples(
    inner: Iterable[Any], indices: IndexBatches, opening: SourceIteration | None
) -> Iterator[tuple[Any, SourceIteration | None, int]]:
    """Batches of a class that iterates in its own way, with the samples delivered for each."""
    taken = samples = 0
    for batch in inner:
        opening = opening or indices.take()  # the user's __iter__ may have asked for torch's iterator only now
        delivered = indices.delivered
        if opening is None:
            indices.bypassed = True
        elif delivered is None:
            opening.notes.clear()
        else:
            while taken < delivered[0] and opening.notes:
                samples = opening.notes.popleft()[3]
                taken += 1
        yield batch, opening, samples
