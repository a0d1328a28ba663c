"""Loaders say where they stand, and results of a batch come once for each sample."""

from __future__ import annotations

import gc
from functools import partial

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, SubsetRandomSampler, WeightedRandomSampler

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
from accelerate.utils import set_seed


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


def resumed(folder, leave):
    """Loaders of a run that was saved while `leave` went through its own."""
    prepared = []
    for _ in range(2):
        accelerator = Accelerator()
        _, *prepared = accelerator.prepare(torch.nn.Linear(1, 1), DataLoader(range(8)), DataLoader(range(6)))
        if not folder.exists():
            leave(*prepared, save=partial(accelerator.save_state, folder))
    accelerator.load_state(folder)
    return accelerator, prepared


def in_the_last_batch(train, _, save):
    for number, _ in enumerate(train):
        if number == 7:
            save()


def in_the_middle(train, evaluated, save):
    next(iter(evaluated))
    for number, _ in enumerate(train):
        if number == 2:
            save()
            break


@pytest.mark.parametrize(("leave", "epoch"), [(in_the_last_batch, 1), (in_the_middle, 0)])
def test_loaders_begin_their_epoch_again_after_a_load_for_scripts_that_skip_by_themselves(tmp_path, leave, epoch):
    """As Accelerate's, which restores no position: with `continue`, with `skip_first_batches`, or by counting epochs."""
    accelerator, (train, evaluated) = resumed(tmp_path / "a", leave)
    assert train.state_dict()["epoch"] == epoch
    assert [len(list(each)) for each in (train, evaluated)] == [8, 6]
    accelerator.load_state(tmp_path / "a")
    assert [len(list(skip_first_batches(train, number))) for number in (0, 3)] == [8, 5]


class Numbers(IterableDataset):
    """Other samples in each epoch; no length."""

    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        return iter(range(100 * self.epoch, 100 * self.epoch + 8))


ENDS = {
    "a remainder is dropped": lambda: DataLoader(range(11), 4, shuffle=True, drop_last=True),
    "a part of the dataset": lambda: DataLoader(range(18), 4, sampler=SubsetRandomSampler(range(8))),
    "more than the dataset": lambda: DataLoader(range(3), 4, sampler=WeightedRandomSampler(torch.ones(3), 8)),
    "a stream": lambda: DataLoader(Numbers(), 4),
}


@pytest.mark.parametrize("at", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", ENDS)
def test_a_script_that_skips_what_it_has_had_reads_on_whatever_the_length_of_an_epoch(tmp_path, kind, at):
    """Three epochs of two batches, saved in one of them."""

    def prepared():
        set_seed(3)
        accelerator = Accelerator(cpu=True)
        return accelerator, accelerator.prepare(torch.nn.Linear(1, 1), ENDS[kind]())[1]

    accelerator, loader = prepared()
    whole = []
    for _ in range(3):
        for batch in loader:
            whole.append(batch.tolist())
            if len(whole) == at:
                accelerator.save_state(tmp_path)
    accelerator, loader = prepared()
    accelerator.load_state(tmp_path)
    ended, had = divmod(at, 2)
    resumed = []
    for epoch in range(ended, 3):
        rest = skip_first_batches(loader, had) if epoch == ended and had else loader
        resumed += [batch.tolist() for batch in rest]
    assert resumed == whole[at:]


def test_stateful_loaders_go_on_where_they_were(tmp_path):
    accelerator = Accelerator()
    _, loader = accelerator.prepare(torch.nn.Linear(1, 1), DataLoader(range(8)))
    loader.use_stateful_dataloader = True  # as of one that is of torchdata's class
    for number, _ in enumerate(loader):
        if number == 2:
            accelerator.save_state(tmp_path)
            break
    accelerator.load_state(tmp_path)
    assert len(list(loader)) == 5
