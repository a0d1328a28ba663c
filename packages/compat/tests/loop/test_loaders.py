"""Loaders say where they stand, and results of a batch come once for each sample."""

from __future__ import annotations

import gc

import pytest
import torch
from torch.utils.data import DataLoader

from accel_testing import run_ranks
from accelerate import Accelerator
from accelerate.data_loader import (
    DataLoaderDispatcher,
    DataLoaderShard,
    SkipBatchSampler,
    SkipDataLoader,
    get_sampler,
    prepare_data_loader,
    skip_first_batches,
)
from accelerate.state import GradientState


@pytest.mark.parametrize("kind", [DataLoaderShard, DataLoaderDispatcher])
def test_a_loader_knows_its_last_batch(kind):
    loader = kind(list(range(10)), batch_size=4)
    for _ in range(2):
        assert [loader.end_of_dataloader for _ in loader] == [False, False, True]
        assert not loader.end_of_dataloader
    assert loader.iteration == 2
    assert loader.remainder == 2
    assert loader.base_dataloader is loader


def test_the_innermost_loader_is_the_active_one():
    accelerator = Accelerator()
    outer, inner = accelerator.prepare(DataLoader(range(2)), DataLoader(range(3)))
    state = GradientState()
    assert state.active_dataloader is None
    for _ in outer:
        assert state.active_dataloader is outer
        for _ in inner:
            assert state.active_dataloader is inner
            assert state.dataloader_references == [None, outer, inner]
            break
        gc.collect()
    assert not state.in_dataloader
    assert state.remainder == -1


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # by torchdata
def test_loaders_are_of_torchdatas_class_if_that_is_asked_for():
    stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
    made = DataLoaderShard(list(range(8)), batch_size=2, use_stateful_dataloader=True)
    prepared = prepare_data_loader(DataLoader(list(range(8)), batch_size=2), use_stateful_dataloader=True)
    for loader in (made, prepared):
        assert isinstance(loader, stateful)
        assert isinstance(loader, DataLoaderShard)
        iterator = iter(loader)
        assert next(iterator).tolist() == [0, 1]
        state = loader.state_dict()
        loader.load_state_dict(state)
        assert [batch.tolist() for batch in loader] == [[2, 3], [4, 5], [6, 7]]


def test_the_first_batches_are_left_out():
    plain = DataLoader(list(range(8)), batch_size=2)
    skipped = skip_first_batches(plain, 3)
    assert [batch.tolist() for batch in skipped] == [[6, 7]]
    prepared = Accelerator().prepare(skipped)
    assert [batch.tolist() for batch in prepared] == [[6, 7]]
    assert [batch.tolist() for batch in SkipDataLoader(list(range(8)), batch_size=2, skip_batches=3)] == [[6, 7]]
    assert len(SkipBatchSampler(plain.batch_sampler, 3)) == 1
    assert get_sampler(prepared) is plain.sampler


def results(rows_per_sample: bool) -> list[int]:
    accelerator = Accelerator()
    loader = accelerator.prepare(DataLoader(torch.arange(1, 8), batch_size=2))
    found = []
    for batch in loader:
        given = batch if rows_per_sample else batch[:1].repeat(4)
        found.append(len(accelerator.gather_for_metrics(given)))
    return found


def test_the_last_result_is_cut_to_the_samples_that_are_left():
    assert results(rows_per_sample=True) == [2, 2, 2, 1]
    assert results(rows_per_sample=False) == [4, 4, 4, 1]
    assert run_ranks(results, 2, True) == [[4, 3]] * 2
    assert run_ranks(results, 2, False) == [[8, 3]] * 2


def test_objects_are_gathered_too():
    accelerator = Accelerator()
    loader = accelerator.prepare(DataLoader(["a", "b", "c"], batch_size=2))
    assert [accelerator.gather_for_metrics(batch) for batch in loader] == [["a", "b"], ["c"]]
    assert accelerator.gather_for_metrics("whole") == "whole"
