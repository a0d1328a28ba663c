"""Boxes of a global shape, against plain tensors that number their elements."""

from __future__ import annotations

import math
import pickle

import torch
from hypothesis import given
from hypothesis import strategies as st

from accel_core.contract.tensor_layouts import Box

shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)


@st.composite
def boxes_of(draw, shape, least=0):
    offsets = [draw(st.integers(0, size - min(least, size))) for size in shape]
    return Box(
        tuple(offsets), tuple(draw(st.integers(min(least, s), s - o)) for o, s in zip(offsets, shape, strict=True))
    )


def numbered(shape):
    return torch.arange(math.prod(shape)).reshape(shape)


def elements(shape, box):
    return numbered(shape)[box.slices].flatten().tolist()


@given(shapes.flatmap(lambda shape: st.tuples(st.just(shape), boxes_of(shape), boxes_of(shape))))
def test_boxes_are_sets_of_elements(drawn):
    shape, one, other = drawn
    mine, theirs = elements(shape, one), elements(shape, other)
    shared = one.intersection(other)
    assert one.numel == len(mine)
    assert one.is_empty == (not mine)
    assert (elements(shape, shared) if shared else []) == sorted(set(mine) & set(theirs))
    assert shared == other.intersection(one)
    if not other.is_empty:
        assert one.contains(other) == (set(theirs) <= set(mine))
    assert one.contains(one)
    assert Box.whole(shape).contains(one)
    if shared:
        assert torch.equal(numbered(shape)[one.slices][shared.relative_to(one).slices], numbered(shape)[shared.slices])


def test_a_0d_tensor_has_one_box_with_one_element():
    box = Box.whole(())
    assert (box, box.numel, box.is_empty, box.slices) == (Box((), ()), 1, False, ())
    assert box.intersection(box) == box
    assert torch.tensor(7)[box.slices] == 7


def test_a_box_is_shown_as_an_index_is_written():
    assert f"{Box((0, 2), (4, 1))} {Box((), ())}" == "[0:4, 2:3] []"


def test_boxes_are_values():
    assert pickle.loads(pickle.dumps(Box((1,), (2,)))) == Box((1,), (2,))
    assert len({Box((1,), (2,)), Box((1,), (2,))}) == 1
