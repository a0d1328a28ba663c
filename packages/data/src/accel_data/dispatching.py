"""The source of a dispatching loader: one rank iterates, and posts to the others.

Batches travel in blocks: a message carries several steps at once, for what a message costs does not
depend on its size as long as it is small. A step is one batch for every rank. The first message of
an iteration carries one step, the next ones more, as long as they stay small.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from accel_core import Feed, Rows, World
from accel_core.api.component import capture_random_state, derive_seed, flatten, restore_random_state
from accel_core.api.loader import Positions, length_of, source_attributes
from accel_data.batch_scatter import BatchScatter
from accel_data.batch_split import Part, Sharing
from accel_data.iterable_source import StreamSource
from accel_data.loader_state import EpochOpening, EpochProgress, Epochs, Start
from accel_data.map_source import EpochSource

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from accel_core.api.loader import Outlet
    from accel_data.batch_split import Batch
    from accel_data.loader import DataLoaderShard
    from accel_data.request import Request

BLOCK = 8
"""The most steps of a message: what one costs is then small beside what reading its batches costs."""

BLOCK_BYTES = 1 << 20
"""A message is not made larger than this by several steps."""

_UNKNOWN = -1
_MORE, _LAST = 0, 1


class Arrived(NamedTuple):
    """A batch, its rows, how many follow, the samples that all ranks have read, its position."""

    batch: Any
    rows: Rows | None
    remaining: int
    samples: int
    extras: dict[str, Any]


class Shared(NamedTuple):
    """A step, shared out: for every rank its part, or None."""

    parts: list[Part | None]
    samples: int
    extras: dict[str, Any]


class Line:
    """The way to the other ranks. Copies share the group; a pickled loader has the world."""

    def __init__(self, group: ProcessGroup | None) -> None:
        self._group = group
        self._scatter: BatchScatter | None = None
        self._serial = 0

    def open(self) -> tuple[BatchScatter, int]:
        """The scatter, and the number of the iteration that begins; both are equal on all ranks."""
        if self._scatter is None:
            self._scatter = BatchScatter(World.current(), self._group)
        self._serial += 1
        return self._scatter, self._serial

    def __deepcopy__(self, memo: dict[int, Any]) -> Line:
        return Line(self._group)

    def __reduce__(self) -> tuple[type[Line], tuple[None]]:
        if self._group is not None:
            raise TypeError(
                "A DataLoaderDispatcher of a group of ranks cannot be pickled: the group lives in this process. Pickle the "
                "loader that you built, and prepare it in the new process."
            )
        return Line, (None,)


class DispatchSource:
    """The parts of one rank, read by the first; `local` is the loader as that reads it, whole.

    `skipped` batches of this rank are left out by every iteration at its beginning; `restarts`:
    also where a position inside the epoch was loaded.
    """

    def __init__(self, local: DataLoaderShard, request: Request) -> None:
        self.local = local
        self.shard = request.shard
        self.identity = local._accel_source.identity
        self.epochs = Epochs()
        self.skipped = 0
        self.restarts = False
        self.sharing = Sharing(local, request)
        self._line = Line(request.group)
        # Tells the messages of loaders apart, for each counts its iterations by itself.
        self._name = derive_seed(self.identity.seed, self.identity.number, self.identity.length or 0)
        # The sampler is asked on the first rank only, so that its generators need not be equal on the others.
        streams = tuple(kind for kind in request.rng_types if kind != "generator")
        self._synchronise = replace(request, rng_types=streams).synchronise()

    def iterate(self, outlet: Outlet) -> Iterator[Any]:
        """One iteration: a collective of the ranks among which batches are shared out."""
        loaded = self.epochs.next()
        opening = self.epochs.open(loaded.leaving_out(self.skipped, restarts=self.restarts))
        return self._reported(loaded, opening, outlet)

    def tell_epoch(self, epoch: int) -> None:
        """Passes the epoch on to the dataset and the samplers, where they take it."""
        self.local._accel_source.tell_epoch(epoch)

    def position(self) -> Start:
        """The position of the loader; on the first rank with generators' and dataset's states."""
        position = self.epochs.position()
        if self.shard.index or position.extras.keys() - {"ended"}:
            return position
        behind = dict(self.local._position().extras)
        behind.pop("ended", None)  # of what was read ahead
        return Start(position.epoch, position.samples, {**behind, **position.extras})

    def check(self, start: Start) -> None:
        """Raises `ValueError` for a position that the loader which reads for all does not take."""
        self.local._accel_source.check(start)

    def restore(self, start: Start) -> None:
        """The next iteration begins there."""
        source = self.local._accel_source
        source.restore(start)
        self.epochs.restore(source.epochs.position())

    def global_batch(self) -> int | None:
        """Rows of a batch over all ranks; None if they vary, or are not made by the loader."""
        return self.sharing.global_batch

    def most_steps(self) -> int | None:
        """Batches of an epoch on the first rank, which has most; None if that is unknown."""
        return self._steps(0)

    def reading(self) -> str:
        """The way in which the ranks get their parts, in words."""
        return "one rank reads, and sends the others their parts"

    def ending(self) -> str:
        """The handling of an incomplete last global batch, in words."""
        if self.sharing.drop_last:
            return "an incomplete last global batch is dropped"
        if self.sharing.even:
            return "an incomplete last global batch is split evenly, and what that fills up is left out by metrics"
        return "an incomplete last global batch is split: ranks may differ by one batch"

    def __len__(self) -> int:
        steps = self._steps(self.shard.index)
        if steps is None:
            return len(self.local)  # raises, and says why
        return steps

    def _steps(self, index: int) -> int | None:
        source = copy.copy(self.local._accel_source)
        source.skipped = 0  # the iteration that was begun last has set it
        samples, batches = _samples(source), source.most_steps()
        if samples is not None:
            return max(self.sharing.steps_of_samples(samples, index) - self.skipped, 0)
        return None if batches is None else max(self.sharing.steps_of_batches(batches) - self.skipped, 0)

    def _reported(self, loaded: Start, opening: EpochOpening, outlet: Outlet) -> Iterator[Any]:
        passage = outlet.feed.enter(outlet)
        opening.start()
        progress = opening.progress
        scatter, serial = self._line.open()
        before = None if self.skipped else progress.samples
        if self._synchronise is not None:
            self._synchronise([])
        try:
            for arrived in (
                self._posted(loaded, outlet.feed, scatter, serial)
                if self.shard.index == 0
                else self._received(scatter, serial)
            ):
                placed, rows = outlet.placed(arrived.batch, arrived.rows, arrived.remaining)
                passage.advance(arrived.remaining, rows, self._positions(arrived, before))
                progress.samples = before = arrived.samples
                progress.extras = arrived.extras
                progress.end = None if arrived.remaining else arrived.samples
                yield placed
            progress.finished = True
        finally:
            passage.leave(ended=progress.finished)

    def _positions(self, arrived: Arrived, before: int | None) -> Positions | None:
        """The sample positions of a batch after `before` others; None if parts may be unequal."""
        rows = arrived.rows
        if before is None or rows is None or rows.rows is None or rows.rows != rows.real:
            return None
        if rows.rows * self.shard.count != arrived.samples - before:
            return None
        return Positions(before + self.shard.index * rows.rows, rows.rows)

    def _posted(self, loaded: Start, feed: Feed, scatter: BatchScatter, serial: int) -> Iterator[Arrived]:
        """Reads, and posts block by block; yields this rank's own."""
        steps = Ahead(self._shared(loaded, feed), feed.lookahead)
        limit, sequence, last = 1, 0, False
        while not last:
            try:
                block = steps.block(limit)
            except Exception as error:
                scatter.post_error(error)
                raise
            last = steps.ended
            parts = [_items(block, rank) for rank in range(self.shard.count)]
            scatter.post(serial, sequence, [_LAST if last else _MORE, self._name], parts)
            for (batch, numbers), (step, _) in zip(parts[0], block, strict=True):
                yield _arrived(batch, numbers, step.extras)
            limit, sequence = min(2 * limit, BLOCK), sequence + 1

    def _received(self, scatter: BatchScatter, serial: int) -> Iterator[Arrived]:
        sequence, more = 0, _MORE
        while more == _MORE:
            (more, name), items = scatter.receive(serial, sequence)
            if name != self._name:
                raise RuntimeError(
                    "The ranks iterate over different loaders: this rank asked for a batch of one, and the rank that reads the "
                    "data sent one of another. Have all ranks leave a loop over a dispatching loader after the same batch "
                    "(decide on one rank and broadcast it), or let every rank read for itself with dispatch_batches=False."
                )
            for batch, numbers in items:
                yield _arrived(batch, numbers, {})
            sequence += 1

    def _shared(self, loaded: Start, feed: Feed) -> Iterator[Shared]:
        sharing = copy.copy(self.sharing)  # it keeps the first batches of one iteration
        even = sharing.even if feed.even_batches is None else feed.even_batches
        for step, is_last in sharing.steps(self._read(loaded, sharing)):
            parts = sharing.shared(step, is_last, even)
            if parts:
                yield Shared(parts, step.samples, step.extras)

    def _read(self, loaded: Start, sharing: Sharing) -> Iterator[tuple[Any, Rows | None, Start]]:
        """The batches of the loader, whole: with their rows, and where it stands then."""
        source, feed = self.local._accel_source, self.local._accel_outlet.feed
        source.identity = self.identity
        source.epochs.restore(loaded)
        source.skipped, source.restarts = self.skipped * sharing.batches_per_step, self.restarts
        source.keeps_first = sharing.batches_per_step
        progress: EpochProgress | None = None
        start = loaded.leaving_out(source.skipped, restarts=source.restarts)
        before = None if start.skipped else start.samples
        for batch in self.local:
            # Of this iteration: another one over the same loader may begin before it ends.
            if progress is None:
                progress = source.epochs.current
                assert progress is not None
                if start.samples or start.skipped:
                    sharing.fill_from(self._read_again(source, source.first, progress.epoch))
            rows, read = feed.current_rows(), 0 if before is None else progress.samples - before
            if rows is None and read and isinstance(source, EpochSource) and source.batched:
                rows = Rows(read, read)  # of a loader class that iterates in its own way
            before = progress.samples
            yield batch, rows, Start(progress.epoch, progress.samples, progress.extras)

    def _read_again(self, source: EpochSource | StreamSource, first: list[Any], epoch: int) -> Iterator[Batch]:
        """The first batches of an epoch, of which the iteration has left some out: by index, or kept."""
        if isinstance(source, StreamSource):
            yield from first
            return
        source, outlet = source.of_batches(first, epoch), replace(self.local._accel_outlet, feed=Feed())
        attributes = {"_accel_source": source, "_iterator": None, "generator": None}
        twin = copy.copy(self.local)
        twin.__dict__.update(source_attributes(twin, source, outlet), **attributes)
        before = capture_random_state(None)  # the run that is continued drew nothing here
        for batch in twin:
            rows = outlet.feed.current_rows()
            yield batch, None if rows is None else rows.rows
        restore_random_state(before, None)


class Ahead:
    """Steps read but not posted: enough to know how many follow, for `lookahead` of them."""

    def __init__(self, steps: Iterator[Shared], lookahead: int) -> None:
        self._steps = steps
        self._lookahead = lookahead
        self._waiting: deque[Shared] = deque()
        self._failure: Exception | None = None
        self.ended = False

    def block(self, limit: int) -> list[tuple[Shared, list[int]]]:
        """The next steps, each with how many follow on every rank; sets `ended` with the last.

        Raises what reading raised, once everything is posted that was read before.
        """
        self._fill(1)
        if self._waiting:
            size = _size(self._waiting[0])
            limit = max(1, min(limit, BLOCK_BYTES // size if size else limit))
            self._fill(limit)
        if self._failure is not None and not self._waiting:
            failure, self._failure = self._failure, None
            try:
                raise failure
            finally:
                del failure  # its frames hold this object, and workers that are to end
        block = []
        for _ in range(min(limit, len(self._waiting))):
            step = self._waiting.popleft()
            block.append((step, self._following(len(step.parts))))
        self.ended = not self._waiting and self._failure is None
        return block

    def _fill(self, steps: int) -> None:
        missing = steps + self._lookahead - len(self._waiting)
        if self._failure is not None or missing <= 0:
            return
        try:
            for step in islice(self._steps, missing):
                self._waiting.append(step)
        except Exception as error:  # noqa: BLE001  (it is raised when its turn comes)
            self._failure = error

    def _following(self, ranks: int) -> list[int]:
        if all(step.parts[-1] is not None for step in self._waiting):
            return [len(self._waiting)] * ranks
        return [sum(step.parts[rank] is not None for step in self._waiting) for rank in range(ranks)]


def _samples(source: EpochSource | StreamSource) -> int | None:
    """The samples of an epoch, if batches of one size are made of them, and that is known."""
    if isinstance(source, EpochSource):
        parts = source.batches().parts() if source.batched else None
        return None if parts is None else parts.total
    return None if source.batch_size is None else length_of(source.dataset)


def _items(block: list[tuple[Shared, list[int]]], rank: int) -> list[tuple[Any, list[int]]]:
    """One rank's batches of a block, each with the integers that are sent with it."""
    items = []
    for step, following in block:
        part = step.parts[rank]
        if part is not None:
            items.append((part.batch, [*_numbers(part.rows), following[rank], step.samples]))
    return items


def _arrived(batch: Any, numbers: list[int], extras: dict[str, Any]) -> Arrived:
    rows, real, remaining, samples = numbers
    if real == _UNKNOWN:
        return Arrived(batch, None, remaining, samples, extras)
    return Arrived(batch, Rows(None if rows == _UNKNOWN else rows, real), remaining, samples, extras)


def _numbers(rows: Rows | None) -> list[int]:
    if rows is None:
        return [_UNKNOWN, _UNKNOWN]
    return [_UNKNOWN if rows.rows is None else rows.rows, rows.real]


def _size(step: Shared) -> int:
    part = step.parts[0]
    leaves = [] if part is None else flatten(part.batch)[0]
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    return sum(
        leaf.nbytes for leaf in tensors if leaf.layout is torch.strided and not leaf.is_nested
    )  # others have none
