"""The part of an epoch that each rank reads, as arithmetic.

A *global step* is `count * part` consecutive positions of the epoch; the rank with index r reads
the r-th part of each. The last step may be incomplete. It is dropped; or filled from the first
positions of the epoch, over again if the epoch is shorter than a step; or left as it is, and then
the last part of a rank may be short or missing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, TypeVar

import torch

from accel_core import Rows

if TYPE_CHECKING:
    from accel_core.api.loader import IndexRead
    from accel_data.order import Order

T = TypeVar("T")

BLOCK = 4096  # positions that are turned into indices at once: enough to hide the cost of the calls


@dataclass(frozen=True)
class Parts:
    """The parts of rank `index` of `count` in an epoch of `total` samples, each of `part` samples.

    An incomplete last step is left out by `drop_last`, else filled if `even`; with one rank there
    is nothing to make even, and its last part is short. The first step begins behind `start`
    samples.
    """

    total: int
    part: int
    index: int
    count: int
    drop_last: bool
    even: bool
    start: int = 0

    @property
    def fills(self) -> bool:
        """Whether an incomplete last step is filled."""
        return self.even and self.count > 1 and not self.drop_last

    def __len__(self) -> int:
        stride, left = self.part * self.count, max(self.total - self.start, 0)
        if self.drop_last:
            return left // stride
        first = 0 if self.fills else self.index * self.part
        return (max(left - first, 0) + stride - 1) // stride

    @property
    def end(self) -> int:
        """The samples that all ranks have read behind the last step."""
        whole, stride = max(self.total - self.start, 0), self.part * self.count
        return self.start + whole - (whole % stride if self.drop_last else 0)

    def real(self, step: int) -> int:
        """The number of real samples in the rank's part of a step."""
        first = self.start + (step * self.count + self.index) * self.part
        return min(max(self.total - first, 0), self.part)

    def behind(self, steps: int) -> Parts:
        """The parts behind so many steps."""
        return replace(self, start=self.start + steps * self.part * self.count)

    def reads(self, order: Order) -> Iterator[IndexRead]:
        """This rank's index batches, each with how many follow, its rows, and the samples of all."""
        steps = len(self)
        if not steps:
            return
        read, stride = self.start, self.part * self.count
        whole = steps if self.real(steps - 1) == self.part else steps - 1
        full, left = Rows(self.part, self.part), steps
        block = max(1, BLOCK // self.part)
        for first in range(0, whole, block):
            indices = self._indices(order, first, min(first + block, whole))
            for start in range(0, len(indices), self.part):
                left -= 1
                read += stride
                yield indices[start : start + self.part], left, full, min(read, self.total)
        if whole < steps:
            real = self.real(whole)
            indices = self._indices(order, whole, steps)
            rows = Rows(self.part, real) if self.fills else Rows(real, real)
            yield indices[: rows.rows], 0, rows, self.total

    def _indices(self, order: Order, first: int, last: int) -> list[int]:
        starts = (torch.arange(first, last) * self.count + self.index) * self.part + self.start
        positions = (starts[:, None] + torch.arange(self.part)).flatten().remainder_(self.total)
        indices: list[int] = order.at(positions).tolist()
        return indices


def piece_of(batch_size: int, count: int) -> int:
    """The samples of one process in a batch cut into equal pieces; ValueError if it cannot be."""
    if batch_size % count:
        raise ValueError(
            f"split_batches=True cuts each batch into {count} equal pieces, but batch_size={batch_size} is not a multiple of "
            f"{count}. Use batch_size={-(-batch_size // count) * count}, or split_batches=False."
        )
    return batch_size // count


def without_length(asked: str, obj: object, counted: str = "samples") -> TypeError:
    """The error of a number that was asked of something that has no length."""
    return TypeError(
        f"{asked} was asked for, but {type(obj).__name__} has no length. Give it a __len__ that returns the number of {counted} "
        f"over all processes, or iterate without asking."
    )


def check_process(asked: str, num_processes: int, process_index: int) -> None:
    """Raises `ValueError`, in the name of `asked`, unless there is a process of that index."""
    if num_processes < 1 or not 0 <= process_index < num_processes:
        raise ValueError(
            f"{asked}(num_processes={num_processes}, process_index={process_index}) names no process: process_index must be at "
            f"least 0 and below num_processes."
        )


def recorded(items: Iterable[T], first: list[T], limit: int, kept: Callable[[T], T] = lambda item: item) -> Iterator[T]:
    """The items; the first of them are also kept."""
    iterator = iter(items)
    for item in islice(iterator, limit):
        first.append(kept(item))
        yield item
    yield from iterator
