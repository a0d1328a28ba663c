"""`IterableDatasetShard`: one process's samples of an iterable dataset, and how they are divided.

A *step* is `count * part` consecutive samples of the stream; the process with index r takes the
r-th part of each. An incomplete last step is dropped; or filled from the first samples of the
stream, over again if it is shorter than a step; or left as it is. What fills up is known by its
place, never guessed.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, Generic, NamedTuple, TypeVar

from torch.utils.data import IterableDataset

from accel_core.api.loader import length_of
from accel_data.loader_state import tell_epoch
from accel_data.shard_arithmetic import Parts, check_process, piece_of, recorded, without_length

T = TypeVar("T")


class Piece(NamedTuple):
    """The samples of a step that one process takes; the first `real` ones do not fill up.

    `read`: the samples of the stream that all processes have read with this step.
    """

    samples: list[Any]
    real: int
    read: int


@dataclass(frozen=True)
class Steps:
    """The rule that divides a stream: `part` samples of a step for process `index` of `count`.

    With one process nothing is filled. Of the stream, `skip` samples are left out at the beginning:
    read, and perhaps filled up with. Of the steps behind them, only each `turns`-th is taken.
    """

    part: int
    index: int
    count: int
    drop_last: bool
    fill: bool
    skip: int = 0
    turn: int = 0
    turns: int = 1

    def length(self, total: int) -> int:
        """The number of samples that the process gets of `total`, over all turns."""
        parts = Parts(total, self.part, self.index, self.count, self.drop_last, self.fill, min(self.skip, total))
        steps = len(parts)
        if not steps:
            return 0
        return (steps - 1) * self.part + (self.part if parts.fills else parts.real(steps - 1))

    def pieces(self, samples: Iterator[Any]) -> Iterator[Piece]:
        """The pieces of this process, in order. Raises ValueError if the stream ends before `skip`.

        `samples` is only asked for the next one: `iter` would begin some hand-written iterators
        anew.
        """
        stride, first = self.part * self.count, self.index * self.part
        fills = self.fill and self.count > 1 and not self.drop_last
        head: list[Any] = []
        stream = recorded(asked(samples), head, stride if fills else 0, _kept)
        read = _passed(stream, self.skip)
        if read < self.skip:
            raise ValueError(
                f"A position behind {self.skip} samples was loaded, but the dataset yields only {read} in this epoch. Load "
                f"it for the dataset of the run that was saved, or begin a new epoch without a state."
            )
        step = 0
        while True:
            taken = _passed(stream, first)
            mine = list(islice(stream, self.part)) if taken == first else []
            taken += len(mine)
            if taken == first + self.part:
                taken += _passed(stream, stride - taken)
            read += taken
            real = len(mine)
            if taken < stride:
                if not taken or self.drop_last:
                    return
                if fills:
                    places = range(max(first, taken), first + self.part)
                    mine += [_kept(head[(place - taken) % len(head)]) for place in places]
            if mine and step % self.turns == self.turn:
                yield Piece(mine, real, read)
            if taken < stride:
                return
            step += 1


class IterableDatasetShard(IterableDataset[T], Generic[T]):
    """Wraps an iterable dataset to yield one process's samples. All have to see the same stream.

    An incomplete last step is left out with `drop_last`, else filled from the first samples of the
    stream, so that all processes get equally many. A single process gets what the dataset yields.
    In a step each process takes `batch_size` samples; with `split_batches`, all of them together.

    Raises:
        ValueError: for a process that does not exist, a batch size below 1, or, with
            `split_batches`, one that the number of processes does not divide.
    """

    def __init__(
        self,
        dataset: Iterable[T],
        batch_size: int = 1,
        drop_last: bool = False,
        num_processes: int = 1,
        process_index: int = 0,
        split_batches: bool = False,
    ) -> None:
        check_process("IterableDatasetShard", num_processes, process_index)
        if batch_size < 1:
            raise ValueError(
                f"IterableDatasetShard(batch_size={batch_size}) would hand out nothing: batch_size must be at least 1."
            )
        self.dataset = dataset
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.num_processes = num_processes
        self.process_index = process_index
        self.split_batches = split_batches
        self._steps()  # raises for what cannot be split

    def set_epoch(self, epoch: int) -> None:
        """Passes the epoch on to the dataset, if it takes it."""
        tell_epoch(epoch, self.dataset)

    def __len__(self) -> int:
        """The number of this process's samples, filling up included; TypeError if not known."""
        total = length_of(self.dataset)
        if total is None:
            raise without_length("The number of samples", self.dataset)
        return self._steps().length(total)

    def __iter__(self) -> Iterator[T]:
        for sample, _ in self.rows():
            yield sample

    def rows(self) -> Iterator[tuple[T, bool]]:
        """The samples of this process, each with whether it is real; those that fill up are not."""
        for samples, real, _ in self._steps().pieces(iter(self.dataset)):
            for place, sample in enumerate(samples):
                yield sample, place < real

    def _steps(self) -> Steps:
        part = piece_of(self.batch_size, self.num_processes) if self.split_batches else self.batch_size
        return Steps(part, self.process_index, self.num_processes, self.drop_last, fill=True)


def asked(iterator: Iterator[T]) -> Iterator[T]:
    """Yields an iterator's items; never calls `iter` on it, nor `next` after its end."""
    while True:
        try:
            sample = next(iterator)
        except StopIteration:
            return
        yield sample


def _kept(sample: Any) -> Any:
    """A sample that is kept whole where collate functions pop from their samples."""
    return copy.copy(sample) if isinstance(sample, (dict, list)) else sample


def _passed(samples: Iterator[Any], count: int) -> int:
    return sum(1 for _ in islice(samples, count))
