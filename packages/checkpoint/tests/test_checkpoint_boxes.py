"""Boxes of ranges, and what boxes cover, against plain tensors that number their elements."""

from __future__ import annotations

import math
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from accel_checkpoint import flat_range, pieces_of, uncovered
from accel_core.api.layouts import Box

shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)


@st.composite
def boxes_of(draw, shape, least=0):
    offsets = [draw(st.integers(0, size - min(least, size))) for size in shape]
    return Box(
        tuple(offsets), tuple(draw(st.integers(min(least, s), s - o)) for o, s in zip(offsets, shape, strict=True))
    )


@st.composite
def tilings(draw, shape):
    """Boxes that cover a shape exactly once, by cutting a box of the list again and again."""
    boxes = [Box.whole(shape)]
    for _ in range(draw(st.integers(0, 8))) if shape else ():
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        at = draw(st.integers(0, box.sizes[dim]))
        for start, size in ((0, at), (at, box.sizes[dim] - at)):
            offsets, sizes = list(box.offsets), list(box.sizes)
            offsets[dim] += start
            sizes[dim] = size
            boxes.append(Box(tuple(offsets), tuple(sizes)))
    return draw(st.permutations(boxes))


def numbered(shape):
    return torch.arange(math.prod(shape)).reshape(shape)


def elements(shape, box):
    return numbered(shape)[box.slices].flatten().tolist()


@given(shapes.flatmap(lambda s: st.tuples(st.just(s), st.lists(st.integers(0, math.prod(s)), min_size=2, max_size=2))))
def test_a_flat_range_is_few_boxes_in_row_major_order(drawn):
    shape, (start, stop) = drawn[0], sorted(drawn[1])
    boxes = flat_range(shape, start, stop)
    each = [elements(shape, box) for box in boxes]
    assert [number for numbers in each for number in numbers] == list(range(start, stop))
    assert all(max(numbers) - min(numbers) == len(numbers) - 1 for numbers in each)  # contiguous, and not empty
    assert len(boxes) <= max(2 * len(shape) - 1, 1)


@pytest.mark.parametrize(
    ("shape", "start", "stop", "boxes"),
    [
        ((), 0, 1, [Box((), ())]),
        ((), 0, 0, []),
        ((), 1, 1, []),
        ((0, 3), 0, 0, []),
        ((4, 3), 0, 12, [Box((0, 0), (4, 3))]),
        ((4, 3), 3, 9, [Box((1, 0), (2, 3))]),
        ((4, 3), 4, 5, [Box((1, 1), (1, 1))]),
        ((4, 3), 1, 11, [Box((0, 1), (1, 2)), Box((1, 0), (2, 3)), Box((3, 0), (1, 2))]),
        ((1, 1, 5), 1, 4, [Box((0, 0, 1), (1, 1, 3))]),
    ],
)
def test_flat_ranges_that_a_reader_can_check(shape, start, stop, boxes):
    assert flat_range(shape, start, stop) == boxes


def test_a_flat_range_of_a_box_lies_in_the_whole_tensor():
    """As where tensor-parallel ranks have a box of a parameter, and its optimizer a range of that box."""
    box = Box((2, 3), (4, 3))
    inside = flat_range(box.sizes, 1, 11, box.offsets)
    assert inside == [Box((2, 4), (1, 2)), Box((3, 3), (2, 3)), Box((5, 3), (1, 2))]
    whole = torch.arange(48).view(6, 8)
    local = whole[box.slices].flatten()[1:11]
    assert [piece.data.tolist() for piece in pieces_of(inside, local)] == [
        whole[each.slices].tolist() for each in inside
    ]


def test_a_flat_range_of_three_dims_can_need_five_boxes():
    assert len(flat_range((3, 3, 3), 1, 26)) == 5


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (3, 2), (0, 13)])
def test_a_range_that_is_not_within_the_tensor_is_refused(start, stop):
    message = rf"elements {start} to {stop} were asked for, but the shape \(4, 3\) has the elements 0 to 12"
    with pytest.raises(ValueError, match=message):
        flat_range((4, 3), start, stop)


@given(shapes.flatmap(lambda shape: st.tuples(st.just(shape), tilings(shape))))
def test_every_tiling_covers_its_shape(drawn):
    shape, boxes = drawn
    assert uncovered(shape, boxes) is None


@given(shapes.flatmap(lambda shape: st.tuples(st.just(shape), st.lists(boxes_of(shape), max_size=5))))
def test_boxes_cover_a_shape_if_every_element_is_in_exactly_one(drawn):
    shape, boxes = drawn
    counts = torch.zeros(shape, dtype=torch.int)
    for box in boxes:
        counts[box.slices] += 1
    assert (uncovered(shape, boxes) is None) == bool((counts == 1).all())


@given(st.data())
def test_a_tiling_with_a_box_left_out_or_doubled_is_recognised(data):
    shape = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple))
    boxes = data.draw(tilings(shape))
    chosen = data.draw(st.sampled_from([box for box in boxes if not box.is_empty]))
    assert uncovered(shape, [box for box in boxes if box != chosen]).endswith("is missing")
    assert uncovered(shape, [*boxes, chosen]).endswith("is there more than once")


@pytest.mark.parametrize(
    ("shape", "boxes", "why"),
    [
        ((4, 3), [], "[0:4, 0:3] is missing"),
        ((4, 3), [Box((0, 0), (2, 3))], "[2:4, 0:3] is missing"),
        ((4, 3), [Box((0, 0), (3, 3)), Box((2, 0), (2, 3))], "[2:3, 0:3] is there more than once"),
        ((4, 3), [Box((0, 0), (5, 3))], "[0:5, 0:3] is out of bounds"),
        ((4, 3), [Box((-1, 0), (1, 3))], "[-1:0, 0:3] is out of bounds"),
        ((4, 3), [Box((0,), (12,))], "[0:12] is out of bounds"),
        ((), [], "[] is missing"),
        ((), [Box((), ()), Box((), ())], "[] is there more than once"),
        ((0, 3), [], None),
        ((4, 3), [Box((9, 9), (0, 9)), Box((0, 0), (4, 3))], None),
    ],
)
def test_what_is_wrong_is_shown_by_a_region(shape, boxes, why):
    assert uncovered(shape, boxes) == why


def test_many_boxes_are_checked_in_less_than_quadratic_time():
    def seconds(side):
        count = side * side
        rows = [Box((row, 0), (1, 10**6)) for row in range(count)]
        tiles = [Box((row, column), (1, 1)) for row in range(side) for column in range(side)]
        begun = time.process_time()
        assert uncovered((count, 10**6), rows) is None
        assert uncovered((side, side), tiles) is None
        return time.process_time() - begun

    assert seconds(95) < 40 * seconds(30)  # for ten times as many; 100 times, if quadratic
