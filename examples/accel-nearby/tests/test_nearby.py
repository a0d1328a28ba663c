"""`nearby` is a loader, as accel-core understands it; what else it promises follows below."""

from __future__ import annotations

import re

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, WeightedRandomSampler

from accel_core import Accelerator
from accel_nearby import Nearby
from accel_testing import LoaderSuite

SAMPLES = list(range(40))


def in_small_blocks():
    return Nearby(block=5)


class TestNearby(LoaderSuite):
    loader = "nearby"
    lacks = {"test_an_iterable_dataset_is_read_once": "it divides indices, and an iterable dataset has none"}


class TestNearbyInSmallBlocks(LoaderSuite):
    loader = in_small_blocks
    worlds = (2,)
    lacks = TestNearby.lacks


class Endless(IterableDataset):
    def __iter__(self):
        return iter(SAMPLES)


def prepared(block=10, **options):
    return Accelerator(loader=Nearby(block), cpu=True).prepare(DataLoader(SAMPLES, **options))


def test_neighbours_are_read_together():
    (order,) = prepared(batch_size=40, shuffle=True)
    blocks = [{sample // 10 for sample in order[start : start + 10].tolist()} for start in range(0, 40, 10)]
    assert all(len(block) == 1 for block in blocks)
    assert order.tolist() != SAMPLES


def test_a_state_goes_on_with_another_batch_size():
    torch.manual_seed(3)
    whole = [sample for batch in prepared(batch_size=4, shuffle=True) for sample in batch.tolist()]
    first, second = prepared(batch_size=4, shuffle=True), prepared(batch_size=5, shuffle=True)
    batches = iter(first)
    next(batches), next(batches)
    second.load_state_dict(first.state_dict())
    assert [sample for batch in second for sample in batch.tolist()] == whole[8:]


def test_batches_can_be_left_out_once():
    accelerator = Accelerator(loader="nearby", cpu=True)
    loader = accelerator.prepare(DataLoader(SAMPLES, batch_size=4))
    rest = accelerator.skip_first_batches(loader, 7)
    assert [batch.tolist() for batch in rest] == [SAMPLES[28:32], SAMPLES[32:36], SAMPLES[36:]]
    assert (len(rest), len(loader)) == (3, 10)
    assert loader.state_dict()["epoch"] == 1


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        (DataLoader(Endless()), "without batches of indices"),
        (DataLoader(SAMPLES, batch_size=None), "without batches of indices"),
        (DataLoader(SAMPLES, sampler=WeightedRandomSampler([1.0] * 40, 40)), "with a WeightedRandomSampler"),
        (DataLoader(SAMPLES, sampler=RandomSampler(SAMPLES, replacement=True)), "with replacement or with a generator"),
        (
            DataLoader(SAMPLES, sampler=RandomSampler(SAMPLES, num_samples=9)),
            "draws 9 samples, and Nearby shuffles all 40",
        ),
        (DataLoader(SAMPLES, shuffle=True, generator=torch.Generator()), "with replacement or with a generator"),
    ],
)
def test_what_it_cannot_divide_is_refused(loader, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        Accelerator(loader="nearby", cpu=True).prepare(loader)


def test_uneven_batches_are_refused():
    accelerator = Accelerator(loader="nearby", cpu=True)
    loader = accelerator.prepare(DataLoader(SAMPLES))
    refused = pytest.raises(ValueError, match="always gives the ranks equally many batches")
    with refused, accelerator.join_uneven_inputs([], even_batches=False):
        next(iter(loader))


def test_a_block_holds_a_sample():
    with pytest.raises(ValueError, match=re.escape("Nearby(block=0) holds no samples")):
        Nearby(block=0)
