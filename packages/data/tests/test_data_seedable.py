"""SeedableRandomSampler: the order is a function of seed and epoch."""

from __future__ import annotations

import copy
import pickle
import random

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler

from accel_data import SeedableRandomSampler

DATA = range(12)


def torch_order(seed, data=DATA, **options):
    """What torch's own sampler draws from a generator with this seed."""
    return list(RandomSampler(data, generator=torch.Generator().manual_seed(seed), **options))


@pytest.mark.parametrize("options", [
    {},
    {"num_samples": 5},
    {"num_samples": 30},
    {"replacement": True, "num_samples": 40},
])  # fmt: skip
def test_an_epoch_is_drawn_as_torch_draws_from_seed_plus_epoch(options):
    """The seeds' meaning; each full pass makes the epoch one more."""
    sampler = SeedableRandomSampler(DATA, data_seed=7, **options)
    assert len(sampler) == len(torch_order(7, **options))
    assert [list(sampler) for _ in range(3)] == [torch_order(7 + epoch, **options) for epoch in range(3)]
    assert sampler.epoch == 3


def test_without_replacement_the_order_is_torch_s_permutation():
    expected = torch.randperm(len(DATA), generator=torch.Generator().manual_seed(7)).tolist()
    assert list(SeedableRandomSampler(DATA, data_seed=7)) == expected


def test_the_epoch_can_be_set():
    sampler = SeedableRandomSampler(DATA, data_seed=7)
    sampler.set_epoch(5)
    assert list(sampler) == torch_order(12)
    sampler.set_epoch(0)
    assert list(sampler) == torch_order(7)


def test_a_pass_that_is_broken_off_is_repeated():
    sampler = SeedableRandomSampler(DATA, data_seed=7)
    next(iter(sampler))
    assert sampler.epoch == 0
    assert list(sampler) == torch_order(7)


def test_an_epoch_that_is_set_during_a_pass_stands():
    sampler = SeedableRandomSampler(DATA, data_seed=7)
    for _ in sampler:
        sampler.set_epoch(4)
    assert sampler.epoch == 4


def test_two_passes_at_once_do_not_disturb_each_other():
    sampler = SeedableRandomSampler(DATA, num_samples=30, data_seed=7)
    pairs = list(zip(sampler, sampler, strict=True))
    assert [a for a, _ in pairs] == [b for _, b in pairs] == torch_order(7, num_samples=30)
    assert sampler.epoch == 1


def test_without_a_data_seed_it_is_the_process_s_seed_when_it_is_made():
    state = torch.get_rng_state()
    try:
        torch.manual_seed(31)
        sampler = SeedableRandomSampler(DATA)
        torch.manual_seed(99)
        assert list(sampler) == torch_order(31)
    finally:
        torch.set_rng_state(state)


def test_a_data_seed_of_zero_is_a_seed():
    assert list(SeedableRandomSampler(DATA, data_seed=0)) == torch_order(0)


def test_the_largest_seed_goes_on_at_zero():
    sampler = SeedableRandomSampler(DATA, data_seed=2**64 - 1)
    assert [list(sampler), list(sampler)] == [torch_order(2**64 - 1), torch_order(0)]


def test_a_generator_that_is_given_is_the_one_that_is_seeded():
    generator = torch.Generator().manual_seed(1)
    sampler = SeedableRandomSampler(DATA, generator=generator, data_seed=7)
    assert list(sampler) == torch_order(7)
    assert sampler.generator is generator
    assert generator.initial_seed() == 7


def test_the_global_streams_are_not_touched():
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    list(SeedableRandomSampler(DATA, data_seed=7))
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == states[1:]


@pytest.mark.parametrize("twin", [copy.deepcopy, lambda sampler: pickle.loads(pickle.dumps(sampler))])
@pytest.mark.parametrize("make_generator", [lambda: None, torch.Generator])
def test_a_copy_goes_on_by_itself(twin, make_generator):
    sampler = SeedableRandomSampler(DATA, generator=make_generator(), data_seed=7)
    list(sampler)
    other = twin(sampler)
    assert list(other) == list(sampler) == torch_order(8)
    list(other)
    assert (sampler.epoch, other.epoch) == (2, 3)


def test_it_serves_torch_s_own_loader():
    loader = DataLoader(DATA, batch_size=4, sampler=SeedableRandomSampler(DATA, data_seed=7))
    assert isinstance(loader.sampler, RandomSampler)
    epochs = [torch.cat(list(loader)).tolist() for _ in range(2)]
    assert epochs == [torch_order(7), torch_order(8)]


@pytest.mark.parametrize("seed", [True, "7", 1.0])
def test_a_seed_that_is_no_whole_number_is_refused(seed):
    with pytest.raises(TypeError, match=r"SeedableRandomSampler\(data_seed=.*\) is a \w+: expected a whole number"):
        SeedableRandomSampler(DATA, data_seed=seed)


def test_a_seed_that_torch_cannot_hold_is_refused():
    with pytest.raises(ValueError, match=r"SeedableRandomSampler\(data_seed=-1\) is out of range"):
        SeedableRandomSampler(DATA, data_seed=-1)
