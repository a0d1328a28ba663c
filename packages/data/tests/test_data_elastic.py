"""A run that is saved in one world and goes on in another: ends of streams, global batches, what is refused beforehand."""

from __future__ import annotations

import warnings
from itertools import islice

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from accel_core import Accelerator, CheckpointError, set_seed
from accel_data import DataLoaderConfiguration
from accel_testing.ranks import run_ranks

LENGTH, BATCH = 10, 4


class Stream(IterableDataset):
    """Without a length, and with a generator that goes on from epoch to epoch."""

    def __init__(self):
        self.generator = torch.Generator().manual_seed(0)

    def __iter__(self):
        order = torch.randperm(LENGTH, generator=self.generator)
        return iter(order.tolist())


def prepared(dispatch):
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=dispatch))
    return accelerator, accelerator.prepare_data_loader(DataLoader(Stream(), batch_size=BATCH))


def save_behind_the_last_batch(dispatch):
    """The samples of the epoch behind it, in order."""
    accelerator, loader = prepared(dispatch)
    for _ in islice(iter(loader), 100):
        last = loader.state_dict()
    following = []
    for batch in loader:
        following += accelerator.gather_for_metrics(batch).tolist()
    return last, following


def go_on(states, dispatch):
    """What the rest of the epoch has, and the whole next one, by each state."""
    found = []
    for state in states:
        accelerator, loader = prepared(dispatch)
        loader.load_state_dict(state)
        epochs = [[], []]
        for epoch in epochs:
            for batch in loader:
                epoch += accelerator.gather_for_metrics(batch).tolist()
        found.append(epochs)
    return found


def test_a_stream_that_was_saved_behind_its_incomplete_last_batch_goes_on_with_the_next_epoch_in_any_world():
    saved = {}
    for ranks in (1, 2):
        for dispatch in (False, True):
            first, *_ = run_ranks(save_behind_the_last_batch, ranks, dispatch)
            saved[ranks, dispatch] = first
    (following,) = {tuple(each[1]) for each in saved.values()}
    assert sorted(following) == list(range(LENGTH))
    states = [last for last, _ in saved.values()]
    for ranks in (1, 2):
        for dispatch in (False, True):
            for rest, next_epoch in run_ranks(go_on, ranks, states, dispatch)[0]:
                assert rest == []
                assert next_epoch == list(following)


def test_a_position_behind_the_end_of_a_stream_is_refused_when_it_is_found():
    _, loader = prepared(False)
    state = loader.state_dict()
    loader.load_state_dict({**state, "samples": 5 * BATCH})
    with pytest.raises(ValueError, match="behind 20 samples was loaded, but Stream yields only 3 batches"):
        list(loader)


# Refused before anything is restored


def resumed(folder, seed=None, length=LENGTH, change=None):
    if seed is not None:
        set_seed(seed)
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(1, 1)
    loaders = [DataLoader(torch.arange(float(length)).view(-1, 1), batch_size=2, shuffle=True) for _ in range(2)]
    return accelerator, *accelerator.prepare(model, *loaders)


def refuse(folder):
    accelerator, model, first, second = resumed(folder, seed=3)
    for _ in islice(first, 2):
        pass
    accelerator.save_state(folder)
    said = []
    for seed, change in ((4, None), (3, 1000)):
        accelerator, model, first, second = resumed(folder, seed=seed)
        before, weight = (first.state_dict(), second.state_dict()), next(model.parameters()).clone()
        if change is not None:
            second.check_state_dict(second.state_dict())
            with pytest.raises(
                ValueError, match="a position behind 1000 samples, but an epoch has 10. Load it into the"
            ):
                second.check_state_dict({**second.state_dict(), "samples": change})
            continue
        try:
            accelerator.load_state(folder)
        except CheckpointError as error:
            said.append(str(error))
        assert (first.state_dict(), second.state_dict()) == before
        assert torch.equal(next(model.parameters()), weight)
    return said


def test_a_loader_of_another_seed_is_refused_before_anything_is_restored(tmp_path):
    for (said,) in run_ranks(refuse, 2, tmp_path / "checkpoint"):
        assert "so nothing was loaded" in said
        assert "loader.0, a DataLoader" in said
        assert "loader.1, a DataLoader" in said
        assert "a state of a run with seed 3, this run has seed 4" in said
        assert "Part of the run was restored" not in said


# The global batch


def run_with(folder, batch_size, steps, saves, **options):
    """The warnings of a run that goes on, or saves."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=steps, **options)
    accelerator.prepare(torch.nn.Linear(1, 1), DataLoader(torch.arange(32.0), batch_size=batch_size))
    if saves:
        accelerator.save_state(folder)
        return []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        accelerator.load_state(folder)
    return [str(each.message) for each in caught]


def test_a_load_says_once_that_a_step_has_another_number_of_samples(tmp_path):
    run_ranks(run_with, 2, tmp_path / "checkpoint", 4, 1, True)
    for batch_size, steps, options, changed in (
        (4, 1, {}, True), (8, 1, {}, False), (4, 2, {}, False), (8, 1, {"split_batches": True}, False)
    ):  # fmt: skip
        (said,) = run_ranks(run_with, 1, tmp_path / "checkpoint", batch_size, steps, False, **options)
        assert len(said) == changed, said
        if changed:
            assert "with 4 samples in a step of the optimizer, and the run that was saved had 8 (loader 0" in said[0]
            assert "has 2 times as many steps" in said[0]
            assert "by split_batches=True, another batch_size or gradient_accumulation_steps" in said[0]
    main, other = run_ranks(run_with, 2, tmp_path / "checkpoint", 8, 1, False)
    assert "with 16 samples" in main[0]
    assert other == []


# Streams that were split beforehand


class Split(Stream):
    """As `split_dataset_by_node` of datasets leaves a stream: with what it is, under this name."""

    class Node:
        rank, world_size = 0, 2

    _distributed = Node()


def prepare_what_was_split():
    said = []
    for options in ({}, {"dispatch_batches": False}, {"presharded": True}):
        accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**options))
        try:
            accelerator.prepare(DataLoader(Split(), batch_size=2))
            said.append(None)
        except ValueError as error:
            said.append(str(error))
    return said


def test_a_stream_that_was_split_by_node_is_not_split_again():
    for first, second, third in run_ranks(prepare_what_was_split, 2):
        for said in (first, second):
            assert (
                "whose dataset split_dataset_by_node() has split for 2 nodes: its part would be shared out again"
                in said
            )
            assert "DataLoaderConfiguration(presharded=True)" in said
        assert third is None
    assert run_ranks(prepare_what_was_split, 1) == [[None, None, None]]
