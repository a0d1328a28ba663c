"""Boxes of a range of elements, and whether boxes cover a shape."""

from __future__ import annotations

import itertools
import math
import operator
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from accel_core.api.layouts import Box


def flat_range(shape: tuple[int, ...], start: int, stop: int, offsets: tuple[int, ...] | None = None) -> list[Box]:
    """The boxes of elements `start` to `stop` in row-major order, as of a part of a flat buffer.

    At most 2 * ndim - 1 boxes, in order, each contiguous in the flat memory; an empty range has
    none. `shape` is that of the tensor, or of the box of it that a tensor-parallel rank has, which
    begins at `offsets`. Raises `ValueError` for a range that is not within it.
    """
    if not 0 <= start <= stop <= math.prod(shape):
        asked = f"the boxes of the elements {start} to {stop} were asked for"
        raise ValueError(f"{asked}, but the shape {shape} has the elements 0 to {math.prod(shape)}.")
    first, runs = offsets or (0,) * len(shape), _runs((), tuple(shape), start, stop)
    return [Box(tuple(map(operator.add, run.offsets, first)), run.sizes) for run in runs]


def _runs(outer: tuple[int, ...], inner: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    """The boxes of a range in a region: at `outer` in leading dims, whole in `inner` ones."""
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
    """The reason why boxes do not cover a shape exactly once, with an example; None if they do.

    Empty boxes count for nothing. The time grows in proportion to the number of boxes.
    """
    whole, inside = Box.whole(shape), [box for box in boxes if not box.is_empty]
    for box in inside:
        if len(box.offsets) != len(shape) or len(box.sizes) != len(shape) or not whole.contains(box):
            return f"{box} is out of bounds"
    return None if whole.is_empty else uncovered_part(whole, inside)


def uncovered_part(part: Box, boxes: Sequence[Box]) -> str | None:
    """Like `uncovered`, for a part of a shape and boxes inside it; none of them empty."""
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
