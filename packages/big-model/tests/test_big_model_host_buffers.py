"""Memory that is lent to tensors is used again only when nothing refers to it."""

from __future__ import annotations

import copy
import gc

import pytest
import torch

from accel_big_model import host_buffers
from accel_big_model.host_buffers import LARGE, HostBuffers


def borrowed(buffers: HostBuffers, mib: int) -> torch.Tensor:
    return buffers.tensor((mib << 18,), torch.float32)


def held(buffers: HostBuffers) -> int:
    """MiB that the buffers have, lent or not."""
    return (sum(map(len, buffers._free)) + sum(len(mapping) for _, mapping in buffers._lent.values())) >> 20


def test_what_a_tensor_leaves_is_taken_by_a_later_one():
    buffers = HostBuffers()
    first = borrowed(buffers, 4)
    address = first.data_ptr()
    del first
    smaller = borrowed(buffers, 3)
    assert smaller.data_ptr() == address
    assert (smaller.shape, smaller.dtype) == ((3 << 18,), torch.float32)


@pytest.mark.parametrize(
    "keep", [lambda tensor: tensor[5:7], torch.nn.Parameter, lambda tensor: tensor.view(torch.uint8).numpy()]
)
def test_a_view_keeps_its_memory(keep):
    buffers = HostBuffers()
    view = keep(borrowed(buffers, 2).fill_(3))
    before = view[:2].tolist()
    gc.collect()
    borrowed(buffers, 2).fill_(7)
    assert view[:2].tolist() == before


def test_there_is_never_more_than_was_lent_at_once():
    buffers = HostBuffers()
    for sizes in ([2, 3], [9], [4, 4], [1], [5, 2, 1], [8]):
        lent = [borrowed(buffers, size) for size in sizes]
        del lent
    borrowed(buffers, 1)
    assert held(buffers) <= 16  # 9 + 4 at most, where the 9 served a 4
    small = buffers.tensor((LARGE - 1,), torch.uint8)  # is left to the allocator of C
    assert small.nbytes == LARGE - 1
    assert len(buffers._lent) == 1


def test_memory_outlives_the_buffers_that_lent_it():
    buffers = HostBuffers()
    tensor = borrowed(buffers, 2).fill_(1)
    del buffers
    gc.collect()
    assert tensor.sum() == 2 << 18


def test_a_copy_has_memory_of_its_own():
    buffers = HostBuffers()
    first = borrowed(buffers, 2).fill_(1)
    other = borrowed(copy.deepcopy(buffers), 2).fill_(2)
    assert first.max() == 1
    assert other.min() == 2


def test_what_comes_back_while_a_tensor_is_made_leaves_that_one_alone(monkeypatch):
    """Another thread, or the garbage collector, drops tensors at any moment."""
    buffers, mapped = HostBuffers(), host_buffers._mapping
    lent = [borrowed(buffers, 2) for _ in range(6)]
    monkeypatch.setattr(host_buffers, "_mapping", lambda nbytes: lent.clear() or mapped(nbytes))
    kept = borrowed(buffers, 4).fill_(1)
    later = [borrowed(buffers, 4).fill_(2) for _ in range(3)]
    assert kept.max() == 1
    assert {kept.data_ptr()}.isdisjoint(each.data_ptr() for each in later)
