"""Sharded loaders: which iteration is which epoch, and who is told."""

from __future__ import annotations

import pytest
from sharded_loaders import Evens, Stream, Told, flat, global_order, ids, prepare
from torch.utils.data import BatchSampler, DataLoader, get_worker_info


@pytest.mark.parametrize("workers", [0, 1])
def test_every_iteration_that_yields_is_the_next_epoch(workers):
    """An iterator that is never advanced begins nothing."""
    options = {"batch_size": 3, "shuffle": True, "num_workers": workers}
    orders = global_order(lambda: DataLoader(range(9), **options), 1, epochs=3)
    loader = prepare(DataLoader(range(9), **options, persistent_workers=bool(workers)))
    for _ in range(3):
        iter(loader)
    assert flat(ids(loader)) == orders[0]
    assert next(iter(loader)).tolist() == orders[1][:3]
    iter(loader)
    assert flat(ids(loader)) == orders[2]


def test_a_loader_zipped_with_itself_pairs_two_epochs():
    make = lambda: DataLoader(range(9), batch_size=3, shuffle=True)
    first, second, third = global_order(make, 1, epochs=3)
    loader = prepare(make())
    pairs = [(a.tolist(), b.tolist()) for a, b in zip(loader, loader, strict=True)]
    assert (flat(a for a, _ in pairs), flat(b for _, b in pairs)) == (first, second)
    assert flat(ids(loader)) == third


def test_an_epoch_can_be_set():
    make = lambda: DataLoader(range(9), batch_size=3, shuffle=True)
    orders = global_order(make, 1, epochs=4)
    loader = prepare(make())
    for epoch in (3, 0, 2):
        loader.set_epoch(epoch)
        assert flat(ids(loader)) == orders[epoch]
    assert flat(ids(loader)) == orders[3]


def test_the_epoch_reaches_dataset_sampler_batch_sampler_and_loader():
    """Automatic at every iteration, and forwarded."""
    told = []

    class Teller(BatchSampler):
        def set_epoch(self, epoch):
            told.append(("batch sampler", epoch))

    class TellingSampler(Evens):
        def set_epoch(self, epoch):
            told.append(("sampler", epoch))

    class TellingLoader(DataLoader):
        def set_epoch(self, epoch):
            told.append(("loader", epoch))

    dataset = Told(10)
    loader = prepare(TellingLoader(dataset, batch_sampler=Teller(TellingSampler(), 2, drop_last=False)))
    list(loader)
    list(loader)
    assert dataset.told == [0, 1]
    assert told == [("batch sampler", 0), ("sampler", 0), ("batch sampler", 1), ("sampler", 1)]
    told.clear()
    loader.set_epoch(5)
    assert told == [("loader", 5), ("batch sampler", 5), ("sampler", 5)]
    assert dataset.told[-1] == 5


def test_workers_get_the_dataset_after_it_was_told_the_epoch():
    class Epoch(Told):
        def __getitem__(self, index):
            return self.told[-1] if get_worker_info() is not None else -1

    loader = prepare(DataLoader(Epoch(2), batch_size=2, num_workers=1))
    assert [flat(ids(loader)) for _ in range(2)] == [[0, 0], [1, 1]]


def test_iterable_sets_are_told_the_epoch_in_a_world_of_one():
    class ToldStream(Stream):
        told = ()

        def set_epoch(self, epoch):
            self.told += (epoch,)

    dataset = ToldStream()
    loader = prepare(DataLoader(dataset, batch_size=2))
    assert ids(loader) == ids(loader) == [[0, 1], [2, 3], [4]]
    assert dataset.told == (0, 1)


def test_an_iterable_set_whose_running_workers_are_told_the_epoch_keeps_its_length():
    class Sized(Stream):
        def set_epoch(self, epoch):
            pass

        def __len__(self):
            return 5

    loader = prepare(DataLoader(Sized(), batch_size=2, num_workers=1, persistent_workers=True))
    assert len(loader) == len(ids(loader)) == 3
