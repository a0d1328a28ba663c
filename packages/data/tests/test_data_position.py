"""Positions: states, what they hold, resuming on any number of ranks, and what is refused."""

from __future__ import annotations

import copy
import itertools
import pickle
import random

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
)

from accel_core.feed import Feed
from accel_core.layout import Shard
from accel_data import BatchSamplerShard, DataLoaderShard, SeedableRandomSampler, Sharded, skip_first_batches

N = 37


def prepare(loader, rank=0, ranks=1, *, feed=None, seed=2**40, number=0, **options):
    """Seeds above 2**32 are those of runs that set none."""
    return Sharded(**options).prepare_loader(loader, Shard(rank, ranks), feed or Feed(), None, seed, number)


class Drawing(Sampler):
    """A sampler of the user's own that draws from the global streams."""

    def __len__(self):
        return N

    def __iter__(self):
        indices = torch.randperm(N).tolist()
        random.shuffle(indices)
        return iter(indices)


class Varying:
    """A batch sampler of the user's own, without attributes."""

    def __iter__(self):
        indices = iter(torch.randperm(N).tolist())
        for size in itertools.cycle((3, 1, 4)):
            batch = list(itertools.islice(indices, size))
            if not batch:
                return
            yield batch


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(N))


class EpochStream(Stream):
    """Each epoch yields other samples."""

    def __init__(self):
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        return (100 * self.epoch + i for i in range(N))


class StatefulStream(Stream):
    """Counts what it has yielded, also over epochs, and begins a pass where it stands."""

    def __init__(self):
        self.at = self.passes = self.read = 0

    def __iter__(self):
        while self.at < N:
            self.at += 1
            self.read += 1
            yield 100 * self.passes + self.at - 1
        self.at = 0
        self.passes += 1

    def state_dict(self):
        return {"at": self.at, "passes": self.passes}

    def load_state_dict(self, state):
        self.at, self.passes = state["at"], state["passes"]


def generator():
    return torch.Generator().manual_seed(5)


LOADERS = {
    "in order": lambda **options: DataLoader(range(N), batch_size=4, **options),
    "shuffled": lambda **options: DataLoader(range(N), batch_size=4, shuffle=True, **options),
    "last dropped": lambda **options: DataLoader(range(N), batch_size=4, shuffle=True, drop_last=True, **options),
    "with replacement": lambda **options: DataLoader(
        range(N), 4, sampler=RandomSampler(range(N), replacement=True, num_samples=50), **options
    ),
    "a generator": lambda **options: DataLoader(range(N), batch_size=4, shuffle=True, generator=generator(), **options),
    "a sampler's generator": lambda **options: DataLoader(
        range(N), batch_size=4, sampler=SubsetRandomSampler(range(N), generator()), **options
    ),
    "seedable": lambda **options: DataLoader(
        range(N), batch_size=4, sampler=SeedableRandomSampler(range(N)), **options
    ),
    "own sampler": lambda **options: DataLoader(range(N), batch_size=4, sampler=Drawing(), **options),
    "own batch sampler": lambda **options: DataLoader(range(N), batch_sampler=Varying(), **options),
    "no batches": lambda **options: DataLoader(range(N), batch_size=None, shuffle=True, **options),
    "lists": lambda **options: DataLoader(
        Lists(), batch_size=None, sampler=BatchSampler(SequentialSampler(range(N)), 4, drop_last=False), **options
    ),
    "stream": lambda **options: DataLoader(Stream(), batch_size=4, **options),
    "stream with epochs": lambda **options: DataLoader(EpochStream(), batch_size=4, **options),
    "stream without batches": lambda **options: DataLoader(EpochStream(), batch_size=None, **options),
    "stateful stream": lambda **options: DataLoader(StatefulStream(), batch_size=4, **options),
}


class Lists(torch.utils.data.Dataset):
    def __getitem__(self, indices):
        return torch.tensor(indices)


def as_list(batch):
    return batch.tolist() if isinstance(batch, torch.Tensor) else batch


def epochs(loader, count=3):
    return [[as_list(batch) for batch in loader] for _ in range(count)]


@pytest.mark.parametrize("saved_at", [0, 1, 4, 9, "last", "end"])
@pytest.mark.parametrize("kind", LOADERS)
def test_a_new_process_goes_on_where_the_state_was_taken(kind, saved_at):
    """R1, C3: another seed is drawn in the new process, for neither run set one."""
    whole = epochs(prepare(LOADERS[kind]()), 4)
    saved = prepare(LOADERS[kind]())
    epochs(saved, 1)
    steps = len(whole[1]) if saved_at in ("last", "end") else saved_at
    iterator = iter(saved)
    found = [as_list(batch) for batch in itertools.islice(iterator, steps)]
    if saved_at == "end":
        assert list(iterator) == []
    assert found == whole[1][:steps]
    state = pickle.loads(pickle.dumps(saved.state_dict()))
    resumed = prepare(LOADERS[kind](), seed=2**41)
    resumed.load_state_dict(state)
    assert resumed.state_dict().keys() == state.keys()
    expected = whole[2:] if saved_at == "end" else [whole[1][steps:], *whole[2:]]
    assert epochs(resumed, len(expected)) == expected
