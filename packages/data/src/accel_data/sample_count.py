"""The number of samples that a batch of a stream was made of.

A stream's last batch may be short, and by its looks one sample with two fields can be two samples:
the one who cuts it has to be told. So the collate function counts, in the worker if there is one,
and the count is taken off before anybody looks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from accel_core.api.loader import CountingIterator


class Collated(NamedTuple):
    """A batch, and how many samples it was made of."""

    batch: Any
    samples: int


class CountingCollate:
    """A collate function that counts."""

    def __init__(self, collate_fn: Callable[[Any], Any]) -> None:
        self.collate_fn = collate_fn

    def __call__(self, samples: list[Any]) -> Collated:
        """The batch of some samples, and their number."""
        count = len(samples)  # before the user's function takes some out
        return Collated(self.collate_fn(samples), count)


class Counting(CountingIterator):
    """torch's iterator over collated batches, for a loader class that may look at the batches.

    Attributes:
        delivered: the batches with their counts, until somebody takes them.
    """

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.delivered: deque[Any] = deque()

    def __next__(self) -> Any:
        collated = super().__next__()
        self.delivered.append(collated)
        return collated.batch

    def _reset(self, *arguments: Any, **options: Any) -> None:
        self.delivered.clear()
        super()._reset(*arguments, **options)


def taken(delivered: deque[Collated] | None, batch: Any) -> int | None:
    """The samples of a yielded batch; None if nobody counts, or it was made of several."""
    if delivered is None:
        return None
    for place, collated in enumerate(delivered):
        if collated.batch is batch:  # the class may have taken more already
            return [delivered.popleft() for _ in range(place + 1)][-1].samples
    only = delivered[0].samples if len(delivered) == 1 else None
    delivered.clear()
    return only
