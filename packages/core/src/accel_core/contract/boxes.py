"""Boxes: rectangular regions of a tensor's global shape, by which strategies say what part of it a rank has."""

from __future__ import annotations

import itertools
import math
import operator
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Box:
    """A region of a global shape: from `offsets`, `sizes` long, one number per dim. A 0-d tensor has one box, `Box((), ())`."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Box:
        """All of a tensor of this shape."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def numel(self) -> int:
        """The number of elements; 1 for the box of a 0-d tensor."""
        return math.prod(self.sizes)

    @property
    def is_empty(self) -> bool:
        """Whether it has no element."""
        return 0 in self.sizes

    @property
    def slices(self) -> tuple[slice, ...]:
        """The index that takes this region out of the whole tensor, as a view."""
        return tuple(slice(start, start + size) for start, size in zip(self.offsets, self.sizes, strict=True))

    def intersection(self, other: Box) -> Box | None:
        """The region that both have, in the same global shape; None if they share no element."""
        pairs = [*zip(self.slices, other.slices, strict=True)]
        starts = tuple(max(mine.start, theirs.start) for mine, theirs in pairs)
        stops = (min(mine.stop, theirs.stop) for mine, theirs in pairs)
        sizes = tuple(stop - start for start, stop in zip(starts, stops, strict=True))
        return Box(starts, sizes) if min(sizes, default=1) > 0 else None

    def relative_to(self, outer: Box) -> Box:
        """This region, with offsets relative to `outer`, which contains it: it slices the data of `outer`."""
        return Box(tuple(map(operator.sub, self.offsets, outer.offsets)), self.sizes)

    def contains(self, other: Box) -> bool:
        """Whether every element of `other` is in this box, and an empty `other` lies in its bounds."""
        pairs = zip(self.slices, other.slices, strict=True)
        return all(mine.start <= theirs.start and theirs.stop <= mine.stop for mine, theirs in pairs)

    def __str__(self) -> str:
        """The box in the form of an index: `[0:4, 2:3]`."""
        return f"[{', '.join(f'{each.start}:{each.stop}' for each in self.slices)}]"


def flat_range(shape: tuple[int, ...], start: int, stop: int, offsets: tuple[int, ...] | None = None) -> list[Box]:
    """The boxes of the elements `start` to `stop`, counted in row-major order: where a part of a flat buffer lies.

    At most 2 * ndim - 1 boxes, in order, each contiguous in the flat memory; an empty range has
    none. Raises `ValueError` for a range that is not within the tensor.

    Args:
        shape: of the tensor, or of the box of it that a tensor-parallel rank has.
        start, stop: counted from the first element of that.
        offsets: where that box begins in the whole tensor; None: it is the whole tensor.
    """
    if not 0 <= start <= stop <= math.prod(shape):
        asked = f"the boxes of the elements {start} to {stop} were asked for"
        raise ValueError(f"{asked}, but the shape {shape} has the elements 0 to {math.prod(shape)}.")
    first, runs = offsets or (0,) * len(shape), _runs((), tuple(shape), start, stop)
    return [Box(tuple(map(operator.add, run.offsets, first)), run.sizes) for run in runs]


def _runs(outer: tuple[int, ...], inner: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    """The boxes of a range inside the region that is at `outer` in the leading dims and whole in the `inner` ones."""
    ones = (1,) * len(outer)
    if start == stop:
        return
    if not inner:
        yield Box(outer, ones)
        return
    rest = inner[1:]
    row = math.prod(rest)
    first, last = -(-start // row), stop // row
    if first > last:  # both ends are inside one row
        yield from _runs((*outer, last), rest, start - last * row, stop - last * row)
        return
    if start < first * row:
        yield from _runs((*outer, first - 1), rest, start - (first - 1) * row, row)
    if first < last:
        yield Box((*outer, first, *(0 for _ in rest)), (*ones, last - first, *rest))
    if last * row < stop:
        yield from _runs((*outer, last), rest, 0, stop - last * row)


def uncovered(shape: tuple[int, ...], boxes: Iterable[Box]) -> str | None:
    """The reason why boxes do not cover a shape exactly once, with an example region; None if they do.

    Empty boxes count for nothing. The time grows in proportion to the number of boxes.
    """
    whole, inside = Box.whole(shape), [box for box in boxes if not box.is_empty]
    for box in inside:
        if len(box.offsets) != len(shape) or len(box.sizes) != len(shape) or not whole.contains(box):
            return f"{box} is out of bounds"
    return None if whole.is_empty else uncovered_part(whole, inside)


def uncovered_part(part: Box, boxes: Sequence[Box]) -> str | None:
    """Like `uncovered`, for a part of a shape that is not empty, and boxes inside it of which none is empty."""
    if [*boxes] == [part]:
        return None
    # How often an element is covered is the sum of the signs of all corners that are not behind it in any dim. So the boxes
    # cover the part exactly once if, and only if, their corners and those of the part cancel out.
    corners: Counter[tuple[int, ...]] = Counter()
    for box, weight in [(part, -1), *((box, 1) for box in boxes)]:
        edges = [((start, 1), (start + size, -1)) for start, size in zip(box.offsets, box.sizes, strict=True)]
        for corner in itertools.product(*edges):
            corners[tuple([at for at, _ in corner])] += weight * math.prod([sign for _, sign in corner])
    left = [corner for corner, count in corners.items() if count]
    if not left:
        return None
    first = min(left)
    ends = [min(corner[dim] for corner in left if corner[dim] > at) for dim, at in enumerate(first)]
    region = Box(first, tuple(end - at for at, end in zip(first, ends, strict=True)))
    return f"{region} is {'missing' if corners[first] < 0 else 'there more than once'}"
