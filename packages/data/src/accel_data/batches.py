"""`BatchSamplerShard`: one process's part of what any batch sampler yields."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, cycle, islice
from typing import Any, TypeVar

from torch.utils.data import BatchSampler, Sampler

from accel_core import Rows
from accel_core.api.loader import length_of, looked_ahead
from accel_data.loader_state import tell_epoch
from accel_data.shard_arithmetic import Parts, check_process, piece_of, recorded, without_length

T = TypeVar("T")
Indices = list[int]
Part = tuple[Indices, Rows, int]
"""An index batch, its rows, and how many samples all processes have read once it is yielded."""

Drawn = Callable[[Iterator[Indices]], Iterator[Indices]]

_AT_ONCE = 1 << 12  # indices that are passed over without a line of Python for each


class BatchSamplerShard(Sampler[Indices]):
    """Wraps a batch sampler to yield the index batches of one process.

    Without `split_batches`, `num_processes` consecutive batches make a global step, and each
    process gets one of them; with it, a batch is a global step, and each process gets an equal
    piece. An incomplete last step is left out with the batch sampler's `drop_last`; else filled
    from the start of the epoch with `even_batches`; else short, or missing on some processes.
    Batches of varying sizes are handed out as they come, and whole first batches fill the last
    step.

    Args:
        batch_sampler: any iterable of lists of indices. Every process must see the same ones.

    Raises:
        ValueError: for a process that does not exist; with `split_batches`, for a batch sampler
            without a `batch_size`, or with one that the number of processes does not divide, and,
            when iterated, for batches of another size.
    """

    def __init__(
        self,
        batch_sampler: Any,
        num_processes: int = 1,
        process_index: int = 0,
        split_batches: bool = False,
        even_batches: bool = True,
    ) -> None:
        check_process("BatchSamplerShard", num_processes, process_index)
        self.batch_sampler = batch_sampler
        self.num_processes = num_processes
        self.process_index = process_index
        self.split_batches = split_batches
        self.even_batches = even_batches
        if split_batches:
            self._check_divisible()

    @property
    def batch_size(self) -> int | None:
        """The `batch_size` of the batch sampler; None if it has none."""
        size = getattr(self.batch_sampler, "batch_size", None)
        return None if size is None else int(size)

    @property
    def drop_last(self) -> bool:
        """The `drop_last` of the batch sampler; False if it has none."""
        return bool(getattr(self.batch_sampler, "drop_last", False))

    def set_epoch(self, epoch: int) -> None:
        """Passes the epoch on to the batch sampler and its sampler, where they take it."""
        tell_epoch(epoch, self.batch_sampler, getattr(self.batch_sampler, "sampler", None))

    def __len__(self) -> int:
        """The number of batches of this process; TypeError if the batch sampler has no length.

        It is an upper bound with `split_batches=True, even_batches=False` and a batch sampler of
        the user's own, for what its last batch holds is not known beforehand.
        """
        parts = self.parts()
        if parts is not None:
            return len(parts)
        batches = length_of(self.batch_sampler)
        if batches is None:
            raise without_length("The number of batches", self.batch_sampler, "batches")
        if self.split_batches or self.num_processes == 1:
            return batches
        if self.drop_last:
            return batches // self.num_processes
        first = 0 if self.even_batches else self.process_index
        return math.ceil(max(batches - first, 0) / self.num_processes)

    def __iter__(self) -> Iterator[Indices]:
        for indices, _, _ in self.rows():
            yield indices

    def parts(self, start: int = 0) -> Parts | None:
        """The arithmetic of this shard behind `start` samples; None unless the length is known."""
        if type(self.batch_sampler) is not BatchSampler:
            return None
        total = length_of(self.batch_sampler.sampler)
        if total is None:
            return None
        size, count = self.batch_sampler.batch_size, self.num_processes
        part = size // count if self.split_batches else size
        return Parts(total, part, self.process_index, count, self.drop_last, self.even_batches, start)

    def rows(
        self, start: int = 0, drawn: Drawn | None = None, head: list[Indices] | None = None, keeps: int = 0
    ) -> Iterator[Part]:
        """The index batches of this process, each with its rows and the real ones among them.

        `start` samples of the epoch are left out: of a batch sampler that is not torch's, whole
        batches. `drawn` wraps the iterator that asks the batch sampler. `head`: a list that gets
        the epoch's first batches, at least `keeps`; of torch's batch sampler in one piece. Raises
        ValueError when iterated if `start` lies inside a batch, or behind the end.
        """
        head = [] if head is None else head
        batches = self._begin(start, head, max(self.num_processes, keeps))
        if drawn is not None:
            batches = drawn(batches)
        if self.num_processes == 1:
            return self._all(batches, start)
        return self._pieces(head, batches, start) if self.split_batches else self._whole_batches(head, batches, start)

    def _begin(self, start: int, head: list[Indices], keeps: int) -> Iterator[Indices]:
        """The batches behind `start` samples. `head` gets the epoch's first ones, to fill up later."""
        sampler = self.batch_sampler
        if start and type(sampler) is BatchSampler:
            first = Indices()
            head.append(first)
            indices = recorded(sampler.sampler, first, sampler.batch_size * keeps)
            return _cut(_rest(indices, start, sampler.sampler), sampler.batch_size, sampler.drop_last)
        return _behind(recorded(map(_listed, sampler), head, keeps), start, sampler)

    def _all(self, batches: Iterator[Indices], start: int) -> Iterator[Part]:
        for batch in batches:
            start += len(batch)
            yield batch, Rows(len(batch), len(batch)), start

    def _whole_batches(self, head: list[Indices], batches: Iterator[Indices], read: int) -> Iterator[Part]:
        """A step is `num_processes` batches."""
        count, index, size = self.num_processes, self.process_index, self.batch_size
        regular = size is not None  # until a batch of another size turns up before the end
        for step, last in with_last(_grouped(batches, count)):
            read += sum(map(len, step))
            short = step[-1] if last else []
            regular = (
                size is not None and regular and all(len(b) == size or (b is short and len(b) < size) for b in step)
            )
            if len(step) == count and (not regular or len(step[-1]) == size):
                yield _real(step[index], read)
            elif self.drop_last:
                return
            elif not self.even_batches:
                if index < len(step):
                    yield _real(step[index], read)
            elif regular and size is not None:
                yield _filled(list(chain(*step)), list(chain(*head)), size, index, read)
            elif index < len(step):
                yield _real(step[index], read)
            else:
                batch = next(islice(cycle(head), index - len(step), None))
                yield batch, Rows(len(batch), 0), read

    def _pieces(self, head: list[Indices], batches: Iterator[Indices], read: int) -> Iterator[Part]:
        """A step is one batch."""
        size = self.batch_size
        assert size is not None
        part, index = size // self.num_processes, self.process_index
        for batch, last in with_last(batches):
            read += len(batch)
            piece = batch[index * part : (index + 1) * part]
            if len(batch) == size:
                yield _real(piece, read)
            elif not last or len(batch) > size:
                raise ValueError(
                    f"split_batches=True needs batches of one size, but {type(self.batch_sampler).__name__} says "
                    f"batch_size={size} and yielded a batch of {len(batch)}. Use split_batches=False, which hands out "
                    f"batches of varying sizes whole."
                )
            elif self.drop_last:
                return
            elif self.even_batches:
                yield _filled(batch, list(chain(*head)), part, index, read)
            elif piece:
                yield _real(piece, read)

    def _check_divisible(self) -> None:
        size = self.batch_size
        if size is None:
            raise ValueError(
                f"split_batches=True cuts each batch into {self.num_processes} equal pieces, but "
                f"{type(self.batch_sampler).__name__} has no batch_size, so its batches may vary. Use "
                f"split_batches=False, which hands out batches of varying sizes whole."
            )
        piece_of(size, self.num_processes)


def _real(batch: Indices, read: int) -> Part:
    return batch, Rows(len(batch), len(batch)), read


def _filled(samples: Indices, head: Indices, part: int, index: int, read: int) -> Part:
    """This process's part of the last step, filled from the first samples as often as needed."""
    start = index * part
    indices = list(islice(chain(samples, cycle(head)), start, start + part))
    return indices, Rows(part, min(max(len(samples) - start, 0), part)), read


def _listed(batch: Any) -> Any:
    """An index batch that can wait: a sampler may fill one list again, or yield generators."""
    return batch if type(batch) is Lone else list(batch)


class Lone(Indices):
    """One index where there are no batches: the loader hands out what the dataset gives for it."""


def _rest(indices: Iterator[int], start: int, sampler: object) -> Iterator[int]:
    read = 0
    while read < start:
        taken = len(list(islice(indices, min(start - read, _AT_ONCE))))
        if not taken:
            raise _too_few(start, read, sampler)
        read += taken
    yield from indices


def _too_few(start: int, read: int, sampler: object) -> ValueError:
    return ValueError(
        f"A position behind {start} samples was loaded, but {type(sampler).__name__} yields only {read} in this epoch. "
        f"Use the sampler of the run that was saved, or begin a new epoch without a state."
    )


def _cut(indices: Iterator[int], size: int, drop_last: bool) -> Iterator[Indices]:
    """Batches, as a BatchSampler makes them."""
    for batch in _grouped(indices, size):
        if len(batch) == size or not drop_last:
            yield batch


def _behind(batches: Iterator[Indices], start: int, sampler: object) -> Iterator[Indices]:
    read = 0
    while read < start:
        batch = next(batches, None)
        if batch is None:
            raise _too_few(start, read, sampler)
        read += len(batch)
    if read > start:
        raise ValueError(
            f"A position behind {start} samples was loaded, which lies inside a batch of {type(sampler).__name__}: its batches "
            f"end at {read - len(batch or ())} and {read}. Use the batch sizes of the run that was saved, or begin a new epoch "
            f"without a state."
        )
    yield from batches


def _grouped(items: Iterable[T], count: int) -> Iterator[list[T]]:
    iterator = iter(items)
    while group := list(islice(iterator, count)):
        yield group


def with_last(items: Iterable[T]) -> Iterator[tuple[T, bool]]:
    """Each item, and whether it is the last; what `items` raises is raised behind the last before it."""
    for item, following in looked_ahead(items, 1):
        yield item, not following
