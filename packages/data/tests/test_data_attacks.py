"""Loops that lost data, repeated it, or misread it: each test is the smallest case of one."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from accel_core import Feed, Shard, World
from accel_data import Sharded
from accel_testing.ranks import run_ranks


class Generating(DataLoader):
    """Its __iter__ is a generator: it asks for torch's iterator once its first batch is asked for."""

    def __iter__(self):
        yield from super().__iter__()


class Holding(DataLoader):
    """Takes all batches before it yields the first."""

    def __iter__(self):
        yield from list(super().__iter__())


class Fields(IterableDataset):
    """Samples of several fields, of which each says which field of which sample it is."""

    def __init__(self, samples, fields):
        self.samples = [tuple(torch.tensor([100 * i + field]) for field in range(fields)) for i in range(samples)]

    def __iter__(self):
        return iter(self.samples)


class Numbers(IterableDataset):
    def __iter__(self):
        return iter(range(16))


def prepare(loader, rank=0, ranks=1, *, feed=None, **options):
    return Sharded(**options).prepare_loader(loader, Shard(rank, ranks), feed or Feed(), None, 5, 0)


def prepare_here(loader, feed=None, **options):
    world = World.current()
    return prepare(loader, world.rank, world.size, feed=feed, **options)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("kind", [DataLoader, Generating])
def test_an_epoch_that_has_nothing_left_is_followed_by_a_whole_one(kind, ranks):
    """Of a class whose __iter__ is a generator, all epochs behind an empty one were empty."""
    loader = prepare(kind(range(8), batch_size=4 // ranks, shuffle=True), 0, ranks)
    batches = iter(loader)
    next(batches), next(batches)
    loader.load_state_dict(loader.state_dict())
    assert [(loader.state_dict()["epoch"], len(list(loader))) for _ in range(3)] == [(0, 0), (1, 2), (2, 2)]


@pytest.mark.parametrize("drop_last", [False, True])
def test_epochs_without_a_batch_are_counted(drop_last):
    loader = prepare(Generating(range(1) if drop_last else [], batch_size=2, drop_last=drop_last))
    for epoch in range(3):
        assert loader.state_dict()["epoch"] == epoch
        assert list(loader) == []


def test_a_position_in_streams_that_ranks_have_for_themselves_is_refused_by_one_that_reads_alone():
    saved = prepare(DataLoader(Numbers(), batch_size=2), 0, 2, presharded=True)
    next(iter(saved))
    alone = prepare(DataLoader(Numbers(), batch_size=2))
    with pytest.raises(
        ValueError, match="streams of 2 ranks that have their own, this loader goes on in those of no such"
    ):
        alone.load_state_dict(saved.state_dict())


def columns(samples):
    """What a collate function of the user's makes: a tuple, where torch's makes a list."""
    return tuple(map(torch.stack, zip(*samples, strict=True)))


CUT = {
    "torch's collate function": lambda data, **options: DataLoader(data, **options),
    "one of the user's": lambda data, **options: DataLoader(data, collate_fn=columns, **options),
    "a generator": lambda data, **options: Generating(data, **options),
    "a class that takes all batches first": lambda data, **options: Holding(data, collate_fn=columns, **options),
    "a worker": lambda data, **options: DataLoader(
        data, num_workers=1, persistent_workers=True, multiprocessing_context="fork", **options
    ),
    "a dataset with indices": lambda data, **options: DataLoader(data.samples, **options),
    "a class over one": lambda data, **options: Generating(data.samples, **options),
}
"""Loaders whose last batch is short, and has as many fields as a whole one has samples."""

SIZES = [(5, 2), (1, 2), (7, 3), (8, 3), (5, 4)]


def read_short_batches():
    found = {}
    for kind, (samples, size), split in itertools.product(CUT, SIZES, [False, True]):
        if split and size % 2:
            continue
        feed = Feed()
        loader = prepare_here(
            CUT[kind](Fields(samples, size), batch_size=size), feed, dispatch_batches=True, split_batches=split
        )
        for _ in range(2):
            read = []
            for batch in loader:
                assert [field.remainder(100).unique().tolist() for field in batch] == [[i] for i in range(size)]
                assert {len(field) for field in batch} == {feed.current_rows().rows}
                read += (batch[0].flatten() // 100).tolist()[: feed.current_rows().real]
        found[kind, samples, size, split] = read
    return found


def test_a_short_batch_with_as_many_fields_as_a_batch_has_samples_is_cut_by_samples():
    """One rank got the inputs of the last sample, and the other its labels."""
    first, second = run_ranks(read_short_batches, 2)
    for key, read in first.items():
        assert sorted(read + second[key]) == list(range(key[1])), key


def sparse(samples):
    return torch.eye(len(samples)).to_sparse()


def read_sparse_batches():
    return [batch.to_dense().tolist() for batch in prepare_here(DataLoader(Numbers(), batch_size=8, collate_fn=sparse))]


def test_batches_that_cannot_be_cut_are_dispatched_whole():
    assert run_ranks(read_sparse_batches, 2) == [[torch.eye(8).tolist()]] * 2
