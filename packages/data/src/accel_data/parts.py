"""What each rank reads of an epoch, as arithmetic.

A *global step* is `count * part` consecutive positions of the epoch; the rank with index r reads the r-th part of each.
The last step may be incomplete. It is dropped; or filled from the first positions of the epoch, over again if the epoch
is shorter than a step; or left as it is, and then the last part of a rank may be short or missing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from accel_core.feed import Rows

if TYPE_CHECKING:
    from accel_core.loading import Read
    from accel_data.order import Order

BLOCK = 4096  # positions that are turned into indices at once: enough to hide the cost of the calls


@dataclass(frozen=True)
class Parts:
    """The parts of one rank.

    Args:
        total: the samples of the epoch.
        part: the samples that a rank reads in a step.
        index: which rank.
        count: how many ranks.
        drop_last: leaves out an incomplete last step.
        even: fills an incomplete last step. With one rank there is nothing to make even, and its last part is short.
    """

    total: int
    part: int
    index: int
    count: int
    drop_last: bool
    even: bool

    @property
    def fills(self) -> bool:
        """Whether an incomplete last step is filled."""
        return self.even and self.count > 1 and not self.drop_last

    def __len__(self) -> int:
        stride = self.part * self.count
        if self.drop_last:
            return self.total // stride
        first = 0 if self.fills else self.index * self.part
        return (max(self.total - first, 0) + stride - 1) // stride

    def real(self, step: int) -> int:
        """How many samples of the rank's part in a step are real."""
        start = (step * self.count + self.index) * self.part
        return min(max(self.total - start, 0), self.part)

    def reads(self, order: Order) -> Iterator[Read]:
        """The index batches of this rank, each with how many follow and its rows; `order.length` is `total`."""
        steps = len(self)
        if not steps:
            return
        whole = steps if self.real(steps - 1) == self.part else steps - 1
        full, left = Rows(self.part, self.part), steps
        block = max(1, BLOCK // self.part)
        for first in range(0, whole, block):
            indices = self._indices(order, first, min(first + block, whole))
            for start in range(0, len(indices), self.part):
                left -= 1
                yield indices[start : start + self.part], left, full
        if whole < steps:
            real = self.real(whole)
            indices = self._indices(order, whole, steps)
            yield (indices, 0, Rows(self.part, real)) if self.fills else (indices[:real], 0, Rows(real, real))

    def _indices(self, order: Order, first: int, last: int) -> list[int]:
        starts = (torch.arange(first, last) * self.count + self.index) * self.part
        positions = (starts[:, None] + torch.arange(self.part)).flatten().remainder_(self.total)
        indices: list[int] = order.at(positions).tolist()
        return indices
