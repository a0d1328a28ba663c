"""Boxes: rectangular regions of a tensor's global shape, in which strategies say which part of a tensor a rank has."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
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
        starts, sizes = [], []
        for mine, size, theirs, length in zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True):
            start = max(mine, theirs)
            shared = min(mine + size, theirs + length) - start
            if shared <= 0:
                return None
            starts.append(start)
            sizes.append(shared)
        return Box(tuple(starts), tuple(sizes))

    def relative_to(self, outer: Box) -> Box:
        """This region, with offsets relative to `outer`, which contains it: it slices the data of `outer`."""
        starts = tuple(mine - theirs for mine, theirs in zip(self.offsets, outer.offsets, strict=True))
        return Box(starts, self.sizes)

    def contains(self, other: Box) -> bool:
        """Whether every element of `other` is in this box, and an empty `other` lies in its bounds."""
        return all(
            mine <= theirs and theirs + length <= mine + size
            for mine, size, theirs, length in zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True)
        )

    def __str__(self) -> str:
        """The box in the form of an index: `[0:4, 2:3]`."""
        ranges = (f"{start}:{start + size}" for start, size in zip(self.offsets, self.sizes, strict=True))
        return f"[{', '.join(ranges)}]"


def flat_range(shape: tuple[int, ...], start: int, stop: int, offsets: tuple[int, ...] | None = None) -> list[Box]:
    """The boxes of the elements `start` to `stop`, counted in row-major order: where a part of a flat buffer lies in a parameter.

    Of a parameter that is a box itself, as tensor-parallel ranks have one, `shape` is that of the
    box, and `offsets` are where it begins in the whole tensor; None: it is the whole tensor. There
    are at most 2 * ndim - 1 of them (for a 0-d tensor one), in order. Each one is contiguous in the
    flat memory of the whole tensor; an empty range has none.

    Raises:
        ValueError: for a range that is not within the tensor.
    """
    total = math.prod(shape)
    if not 0 <= start <= stop <= total:
        raise ValueError(
            f"the boxes of the elements {start} to {stop} were asked for, but the shape {shape} has the elements 0 to {total}. "
            f"Give a start and a stop that are counted from the first element of this tensor, the smaller one first."
        )
    runs = _runs((), (), tuple(shape), start, stop)
    if offsets is None:
        return list(runs)
    return [Box(tuple(map(sum, zip(run.offsets, offsets, strict=True))), run.sizes) for run in runs]


def _runs(
    offsets: tuple[int, ...], ones: tuple[int, ...], inner: tuple[int, ...], start: int, stop: int
) -> Iterator[Box]:
    """The boxes of a range inside the region that begins at `offsets` in the leading dims and is whole in the `inner` ones."""
    if start == stop:
        return
    if not inner:
        yield Box(offsets, ones)
        return
    rest = inner[1:]
    row = math.prod(rest)
    first, last = -(-start // row), stop // row
    if first > last:  # both ends are inside one row
        yield from _runs((*offsets, last), (*ones, 1), rest, start - last * row, stop - last * row)
        return
    if start < first * row:
        yield from _runs((*offsets, first - 1), (*ones, 1), rest, start - (first - 1) * row, row)
    if first < last:
        yield Box((*offsets, first, *(0 for _ in rest)), (*ones, last - first, *rest))
    if last * row < stop:
        yield from _runs((*offsets, last), (*ones, 1), rest, 0, stop - last * row)


def uncovered(shape: tuple[int, ...], boxes: Iterable[Box]) -> str | None:
    """The reason why boxes do not cover a shape exactly once, with an example region; None if they do.

    Empty boxes count for nothing. The time grows with the number of boxes n as n log n where they
    are rows, columns or a grid, whatever the number of elements.
    """
    whole, inside = Box.whole(shape), [box for box in boxes if not box.is_empty]
    for box in inside:
        if len(box.offsets) != len(shape) or len(box.sizes) != len(shape) or not whole.contains(box):
            return f"{box} is out of bounds"
    return None if whole.is_empty else uncovered_part(whole, inside)


def uncovered_part(part: Box, boxes: list[Box]) -> str | None:
    """Like `uncovered`, for a part of a shape that is not empty, and boxes inside it of which none is empty."""
    if _in_a_row(part, boxes):
        return None
    regions = [(part, list(boxes))]  # is cut in two, and the boxes with it, until one box fills each region
    while regions:
        region, inside = regions.pop()
        if not inside:
            return f"{region} is missing"
        if region not in inside:
            regions += _halves(region, inside)
        elif len(inside) > 1:
            inside.remove(region)
            return f"{inside[0]} is there more than once"
    return None


def _in_a_row(part: Box, boxes: list[Box]) -> bool:
    """Whether the boxes follow each other along one dim, and are whole in the others: mostly they do, and this is fast."""
    if not boxes or not part.sizes:
        return False
    dim = next((dim for dim, size in enumerate(part.sizes) if size != boxes[0].sizes[dim]), 0)
    at = part.offsets[dim]
    for box in sorted(boxes, key=lambda box: box.offsets[dim]):
        size = box.sizes[dim]
        if box != _with_range(part, dim, at, size):
            return False
        at += size
    return at == part.offsets[dim] + part.sizes[dim]


def _halves(region: Box, boxes: list[Box]) -> list[tuple[Box, list[Box]]]:
    """Two parts of a region that no box fills, cut at the edge of a box so that the larger one has as few boxes as may be."""
    cuts = [_cut(region, boxes, dim) for dim in range(len(region.sizes))]
    dim, at = min((most, dim, at) for dim, (most, at) in enumerate(cuts))[1:]
    start, size = region.offsets[dim], region.sizes[dim]
    parts = [_with_range(region, dim, start, at - start), _with_range(region, dim, at, start + size - at)]
    return [(part, [shared for box in boxes if (shared := box.intersection(part))]) for part in parts]


def _cut(region: Box, boxes: list[Box], dim: int) -> tuple[float, int]:
    """The median edge along a dim: how many boxes the larger part would have (infinitely many if no edge is inside), and where."""
    low, high = region.offsets[dim], region.offsets[dim] + region.sizes[dim]
    starts = [box.offsets[dim] for box in boxes]
    stops = [box.offsets[dim] + box.sizes[dim] for box in boxes]
    edges = sorted(edge for edge in (*starts, *stops) if low < edge < high)
    if not edges:
        return math.inf, low
    at = edges[len(edges) // 2]
    return max(sum(start < at for start in starts), sum(stop > at for stop in stops)), at


def _with_range(box: Box, dim: int, start: int, size: int) -> Box:
    """The box with another range in one dim."""
    return Box((*box.offsets[:dim], start, *box.offsets[dim + 1 :]), (*box.sizes[:dim], size, *box.sizes[dim + 1 :]))
