"""The division of a global batch that one rank has read into the parts of all ranks.

A whole step goes out as it is: a batch for each rank, or an equal piece of one batch with
`split_batches`. Only an incomplete last step is cut: its rows are split evenly, and filled up to a
multiple of the ranks with the first rows that were read. If it cannot be cut, its batches go out
whole, and the first batches fill up, as padding.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import cycle, islice
from typing import TYPE_CHECKING, Any, NamedTuple

from torch.utils.data import default_collate, default_convert

from accel_core import Rows
from accel_data.batch_rows import Samples, Unsplittable, concatenate, count_rows, holds_samples, slice_rows
from accel_data.batches import with_last
from accel_data.sample_count import CountingCollate
from accel_data.shard_arithmetic import piece_of

if TYPE_CHECKING:
    from accel_data.loader import DataLoaderShard
    from accel_data.loader_state import Start
    from accel_data.request import Request

Batch = tuple[Any, "int | None"]
"""A batch and its rows; None if it cannot be cut into rows."""


class Step(NamedTuple):
    """The batches that make a step, and the position behind them."""

    batches: list[Batch]
    samples: int
    extras: Any


class Part(NamedTuple):
    """One rank's part of a step."""

    batch: Any
    rows: Rows | None


class Sharing:
    """The rules for one loader; ValueError if its batches cannot be cut into equal pieces."""

    def __init__(self, loader: DataLoaderShard, request: Request) -> None:
        self.count = request.shard.count
        self.split = request.options.split_batches and self.count > 1
        self.even = request.options.even_batches
        sampler = loader.batch_sampler
        size = getattr(sampler, "batch_size", None) if loader.batch_size is None else loader.batch_size
        self.size: int | None = size
        self.drop_last = bool(loader.drop_last or getattr(sampler, "drop_last", False))
        self.slice_fn = request.slice_fn
        self._head: list[Batch] = []  # the first batches of the iteration, for filling up
        self._left_out: Iterator[Batch] = iter(())  # the first batches of the epoch, where the iteration left them out
        self._samples = _collates_to_samples(loader.collate_fn)
        if self.split and size is not None:
            piece_of(size, self.count)

    @property
    def batches_per_step(self) -> int:
        """The number of batches of the loader that make a step."""
        return 1 if self.split else self.count

    @property
    def global_batch(self) -> int | None:
        """Rows of a step; None if they vary."""
        return None if self.size is None else self.size * self.batches_per_step

    def steps_of_samples(self, samples: int, index: int) -> int:
        """The batches that a rank gets of so many samples."""
        assert self.global_batch is not None
        whole, rest = divmod(samples, self.global_batch)
        if self.drop_last or not rest:
            return whole
        if self.even:
            return whole + 1
        return whole + (index * -(-rest // self.count) < rest)

    def steps_of_batches(self, batches: int) -> int:
        """The batches that the first rank gets of so many batches of the loader."""
        return batches // self.batches_per_step if self.drop_last else -(-batches // self.batches_per_step)

    def steps(self, read: Iterator[tuple[Any, Rows | None, Start]]) -> Iterator[tuple[Step, bool]]:
        """The batches that were read, step by step, and whether a step is the last.

        What reading raises is raised behind the last step that was read before.
        """
        self._head = []
        return with_last(self._grouped(read))

    def fill_from(self, batches: Iterable[Batch]) -> None:
        """Has steps filled up from these batches, if there are any. They are read for the first such step."""
        self._left_out = iter(batches)

    def shared(self, step: Step, is_last: bool, even: bool) -> list[Part | None]:
        """The parts of all ranks; none if the step is dropped."""
        if self._is_whole(step, is_last):
            if self.split or self.slice_fn is not None:
                # In the middle of an epoch a batch that does not divide is filled up, or ranks would fall out of step.
                return self._cut(step, self.count, even or not is_last)
            return _as_they_are(step.batches)
        if self.drop_last:
            return []
        try:
            return self._cut(step, self.count, even)
        except Unsplittable:
            if self.split or self.slice_fn is not None:
                raise
            return self._handed_out(step, even)

    def _grouped(self, read: Iterator[tuple[Any, Rows | None, Start]]) -> Iterator[Step]:
        while group := list(islice(read, self.batches_per_step)):
            batches = [self._counted(batch, self.size if rows is None else rows.rows) for batch, rows, _ in group]
            self._head = self._head or batches
            position = group[-1][2]
            yield Step(batches, position.samples, position.extras)

    def _counted(self, batch: Any, expected: int | None) -> Batch:
        """A batch and its rows. Its members are samples, or columns, in all batches of a loader."""
        if self._samples is None and expected is not None:
            self._samples = holds_samples(batch, expected)
        samples = type(batch) is list if self._samples is None else self._samples
        if samples and type(batch) is list:
            batch = Samples(batch)
        return batch, count_rows(batch, expected)

    def _is_whole(self, step: Step, is_last: bool) -> bool:
        if len(step.batches) < self.batches_per_step:
            return False
        *others, (_, rows) = step.batches
        if not is_last or self.size is None or rows is None or rows >= self.size:
            return True
        return any(other != self.size for _, other in others)  # sizes vary, so this one is not short

    def _cut(self, step: Step, count: int, even: bool) -> list[Part | None]:
        """An equal piece of the step for everyone."""
        batch, rows = self._joined(step.batches)
        part = -(-rows // count)
        whole = self._filled(batch, rows, part * count) if even and rows % count else batch
        held = part * count if whole is not batch else rows
        parts: list[Part | None] = []
        for rank in range(count):
            start, stop = min(rank * part, held), min((rank + 1) * part, held)
            real = min(max(rows - start, 0), stop - start)
            piece = self._sliced(whole, start, stop, held, rank)
            parts.append(Part(piece, Rows(stop - start, real)) if stop > start else None)
        return parts

    def _sliced(self, batch: Any, start: int, stop: int, rows: int, rank: int) -> Any:
        if self.slice_fn is None:
            return _plain(slice_rows(batch, start, stop, rows))
        return self.slice_fn(_plain(batch), slice(start, stop), process_index=rank, num_processes=self.count)

    def _first(self) -> list[Batch]:
        """The first batches of the epoch."""
        left_out = [self._counted(batch, self.size if rows is None else rows) for batch, rows in self._left_out]
        self._head = left_out or self._head
        return self._head

    def _joined(self, batches: list[Batch]) -> tuple[Any, int]:
        if len(batches) == 1 and batches[0][1] is None and self.slice_fn is not None and self.size is not None:
            return batches[0][0], self.size  # only the user's function knows how to cut it
        rows = [self._rows_of(batch) for batch in batches]
        return concatenate([batch for batch, _ in batches], rows), sum(rows)

    def _rows_of(self, batch: Batch) -> int:
        value, rows = batch
        if rows is None:
            concatenate([value], [self.size or 0])  # raises, and says what such a batch lacks
            raise AssertionError("a batch that can be cut has rows")
        return rows

    def _filled(self, batch: Any, rows: int, wanted: int) -> Any:
        """The batch with rows from the first ones of the epoch, over and over if need be."""
        batches, counts = [batch], [rows]
        for value, available in cycle([(value, self._rows_of((value, count))) for value, count in self._first()]):
            taken = min(wanted - sum(counts), available)
            batches.append(slice_rows(value, 0, taken, available))
            counts.append(taken)
            if sum(counts) == wanted:
                return concatenate(batches, counts)
        raise AssertionError("there is a first batch")

    def _handed_out(self, step: Step, even: bool) -> list[Part | None]:
        """The batches as they are; the first ones fill up."""
        parts = _as_they_are(step.batches)
        missing = self.count - len(parts)
        if not even:
            return [*parts, *[None] * missing]
        return [*parts, *[Part(_plain(batch), Rows(rows, 0)) for batch, rows in islice(cycle(self._first()), missing)]]


def _collates_to_samples(collate: Any) -> bool | None:
    """Whether a collate function gives the list of its samples; None if that is to be seen."""
    if isinstance(collate, CountingCollate):
        return _collates_to_samples(collate.collate_fn)
    if collate is list:
        return True
    return False if collate in (default_collate, default_convert) else None


def _as_they_are(batches: list[Batch]) -> list[Part | None]:
    return [Part(_plain(batch), None if rows is None else Rows(rows, rows)) for batch, rows in batches]


def _plain(batch: Any) -> Any:
    return list(batch) if isinstance(batch, Samples) else batch
