"""Sharded loaders: what they say of their sizes, their length, and the end of an epoch."""

from __future__ import annotations

import re

import pytest
from sharded_loaders import Stream, Triples, prepare
from torch.utils.data import DataLoader

from accel_core import Accelerator, Feed


def test_sizes_are_those_of_all_ranks():
    loader = DataLoader(range(100), batch_size=8)
    assert (prepare(loader, 0, 4).total_batch_size, prepare(loader, 0, 4).total_dataset_length) == (32, 100)
    assert prepare(loader, 0, 4, split_batches=True).total_batch_size == 8
    assert prepare(loader).total_batch_size == 8
    assert prepare(DataLoader(range(4), batch_sampler=[[0, 1], [2]])).total_batch_size is None
    assert prepare(DataLoader(Stream(), batch_size=2)).total_batch_size == 2
    with pytest.raises(
        TypeError, match="total_dataset_length was asked for, but Stream has no length. Give it a __len__"
    ):
        prepare(DataLoader(Stream())).total_dataset_length


def test_describing_tells_every_batch_size_and_how_an_epoch_ends():
    loader = DataLoader(range(100), batch_size=8)
    description = prepare(loader, 1, 4, feed=Feed(lookahead=2)).describe()
    assert (description.per_rank_batch, description.global_batch, description.effective_batch) == (8, 32, 64)
    assert (description.batches, description.steps, description.samples, description.ranks) == (4, 2, 100, 4)
    assert str(description) == (
        "batch per rank 8, global batch 32 on 4 data-parallel rank(s), effective batch 64 with accumulation 2; "
        "4 batches per rank and 2 steps per epoch over 100 samples; an incomplete last global batch is filled from the first samples, "
        "which metrics leave out; every rank reads its own part"
    )


@pytest.mark.parametrize(("loader", "ranks", "options", "expected"), [
    (DataLoader(range(9), batch_size=4), 2, {"split_batches": True}, "batch per rank 2, global batch 4"),
    (DataLoader(range(9), batch_size=4), 2, {"even_batches": False}, "left as it is: ranks may differ by one batch"),
    (DataLoader(range(9), batch_size=4, drop_last=True), 2, {}, "1 steps per epoch over 9 samples; .* is dropped"),
    (DataLoader(range(9), batch_size=4), 1, {}, "3 steps per epoch over 9 samples; the last batch may be short"),
    (DataLoader(range(9), batch_sampler=[[0], [1, 2]]), 1, {}, "per rank varies, global batch varies"),
    (DataLoader(range(9), batch_sampler=Triples()), 2, {}, "unknown steps per epoch"),
    (DataLoader(Stream(), batch_size=2), 1, {}, "unknown steps per epoch over an unknown number of samples; batches come"),
    (DataLoader(range(9), batch_size=None), 1, {}, "9 steps per epoch over 9 samples; batches come as the dataset"),
])  # fmt: skip
def test_every_kind_of_loader_can_be_described(loader, ranks, options, expected):
    assert re.search(expected, str(prepare(loader, 0, ranks, **options).describe()))


def test_steps_are_windows_of_which_the_last_may_be_short():
    description = prepare(DataLoader(range(26)), 0, 1, feed=Feed(lookahead=4)).describe()
    assert (description.batches, description.steps) == (26, 7)


def test_the_length_is_the_number_of_iterations_of_this_rank():
    """In every mode, also where ranks differ."""
    lengths = [len(prepare(DataLoader(range(9), batch_size=2), rank, 2, even_batches=False)) for rank in (0, 1)]
    assert lengths == [3, 2]
    with pytest.raises(TypeError, match="Triples has no length. Give it a __len__"):
        len(prepare(DataLoader(range(9), batch_sampler=Triples()), 0, 2))


def test_even_batches_may_be_assigned_for_loaders_that_are_prepared_afterwards():
    accelerator = Accelerator()
    accelerator.even_batches = False
    assert accelerator.even_batches is False
    assert accelerator.prepare(DataLoader(range(9), batch_size=4))._accel_source.even_batches is False
    with pytest.raises(TypeError, match="even_batches='no' is a str: expected True or False"):
        accelerator.even_batches = "no"


@pytest.mark.parametrize("dispatched", [False, True])
def test_the_running_loader_is_the_prepared_one(dispatched):
    accelerator = Accelerator(dispatch_batches=dispatched)
    loader = accelerator.prepare(DataLoader(range(5), batch_size=2))
    seen = []
    for _ in loader:
        running = accelerator.running_loader
        seen.append((running.loader is loader, running.is_last, running.rows.real))
    assert seen == [(True, False, 2), (True, False, 2), (True, True, 1)]
