"""Sharded loaders: order, padding, what survives, and what is refused."""

from __future__ import annotations

import copy
import itertools
import pickle
import random

import pytest
import torch
from sharded_loaders import Evens, Told, Triples, flat, global_order, ids, prepare
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from accel_core import Feed, Rows, World
from accel_data import BatchSamplerShard, DataLoaderShard


class Noisy(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.tensor([torch.initial_seed(), random.getrandbits(40), torch.randint(2**40, ()).item()])


class Broken(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        raise LookupError("broken sample")


class Rows2(Dataset):
    def __getitem__(self, indices):
        return torch.tensor(indices)

    def __len__(self):
        return 5


class WeirdLoader(DataLoader):
    """A subclass with an attribute and an __iter__ of its own."""

    def __init__(self, *args, flavour="none", repeat=1, keep=None, **kwargs):
        super().__init__(*args, **kwargs)
        self.flavour = flavour
        self.repeat = repeat
        self.keep = keep

    def __iter__(self):
        for batch in itertools.islice(super().__iter__(), self.keep):
            for _ in range(self.repeat):
                yield batch + 100


def test_a_shuffled_order_is_a_function_of_seed_and_epoch():
    """It differs by epoch and by seed, and is the same in another run."""
    make = lambda: DataLoader(range(50), batch_size=4, shuffle=True)
    [first, second] = global_order(make, 1, epochs=2)
    assert sorted(first) == sorted(second) == list(range(50))
    assert first != second != list(range(50))
    assert global_order(make, 1, epochs=2) == [first, second]
    assert global_order(make, 1, seed=1) != [first]


@pytest.mark.parametrize("make_sampler", [
    lambda: RandomSampler(range(30)),
    lambda: RandomSampler(range(30), num_samples=17),
    lambda: RandomSampler(range(30), num_samples=70),
    lambda: RandomSampler(range(30), replacement=True, num_samples=45),
    lambda: WeightedRandomSampler(torch.arange(1.0, 31.0), 40),
    lambda: SubsetRandomSampler(range(3, 24)),
    lambda: Evens(),
])  # fmt: skip
@pytest.mark.parametrize("split", [False, True])
def test_the_order_is_the_same_on_any_number_of_ranks(make_sampler, split):
    """On one, two and four ranks, for every kind of sampler; its number of samples is honoured."""
    size = 4 if split else 2
    make = lambda: DataLoader(range(30), batch_size=size, sampler=make_sampler())
    one, two, four = (global_order(make, ranks, epochs=2, split_batches=split) for ranks in (1, 2, 4))
    assert one == two == four
    assert len(one[0]) == len(make_sampler())
    assert one[0] != one[1] or type(make_sampler()) is Evens


def test_draws_without_replacement_use_every_sample_equally_often():
    [order] = global_order(lambda: DataLoader(range(10), sampler=RandomSampler(range(10), num_samples=25)), 1)
    assert sorted(order[:10]) == sorted(order[10:20]) == list(range(10))
    assert len(set(order[20:])) == 5


def test_the_users_own_random_calls_change_nothing():
    """Whatever is drawn between batches and epochs, the order is the same."""
    loader = prepare(DataLoader(range(20), batch_size=3, shuffle=True))
    expected = [ids(loader), ids(loader)]
    loader.set_epoch(0)
    torch.manual_seed(999)
    found = []
    for _ in range(2):
        found.append([])
        for batch in loader:
            torch.rand(7)
            random.random()
            found[-1].append(batch.tolist())
    assert found == expected


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("shuffle", [False, True])
def test_the_global_stream_moves_as_with_torch(ranks, workers, shuffle):
    """After an epoch, the state of torch's global generator is what torch's loader leaves."""
    loader = DataLoader(range(8), batch_size=2, shuffle=shuffle, num_workers=workers)
    torch.manual_seed(5)
    list(loader)
    expected = torch.get_rng_state()
    prepared = prepare(loader, 0, ranks)
    torch.manual_seed(5)
    list(prepared)
    assert torch.equal(torch.get_rng_state(), expected)


def test_one_process_without_shuffling_gives_torchs_batches_and_worker_streams():
    loader = DataLoader(Noisy(), batch_size=4, num_workers=2)
    torch.manual_seed(0)
    theirs = list(loader)
    torch.manual_seed(0)
    assert all(map(torch.equal, prepare(loader), theirs))


def test_worker_streams_differ_by_rank_worker_and_epoch_and_are_reproducible():
    """Augmentation differs by rank; all streams derive from one seed."""

    def draws(rank):
        torch.manual_seed(0)
        loader = prepare(DataLoader(Noisy(), batch_size=2, num_workers=2), rank, 2, seed=7)
        return [torch.cat(list(loader)) for _ in range(2)]

    everything = torch.cat([*draws(0), *draws(1)])
    assert len(everything[:, 0].unique()) == 2 * 2 * 2  # ranks, workers, epochs
    assert len(everything[:, 1].unique()) == len(everything[:, 2].unique()) == 16
    assert all(map(torch.equal, draws(1), draws(1)))


def test_a_generator_of_the_users_is_used_as_torch_uses_it():
    """In a world of one."""
    make = lambda: DataLoader(range(9), batch_size=2, shuffle=True, generator=torch.Generator().manual_seed(4))
    loader = make()
    prepared = prepare(make())
    assert [ids(prepared), ids(prepared)] == [ids(loader), ids(loader)]


def test_a_loader_of_one_process_never_asks_for_the_world(monkeypatch):
    """It reads the environment and sets the device: once per run is enough."""
    monkeypatch.setattr(World, "current", lambda **options: pytest.fail("World.current() was called"))
    generator = torch.Generator()
    for options in ({}, {"shuffle": True}, {"shuffle": True, "generator": generator}):
        prepared = prepare(DataLoader(range(4), **options))
        assert sorted(flat(ids(prepared))) == sorted(flat(ids(prepared))) == [0, 1, 2, 3]


def test_the_users_sampler_is_not_changed_but_what_they_change_is_seen():
    """Samplers are kept; the original is not mutated."""
    sampler = WeightedRandomSampler([1.0] * 10, 10)
    loader = prepare(DataLoader(range(10), batch_size=5, sampler=sampler))
    ids(loader)
    assert sampler.generator is None
    assert loader.sampler is sampler
    sampler.weights = torch.tensor([0.0] * 9 + [1.0], dtype=torch.double)
    assert ids(loader) == [[9] * 5] * 2


def test_a_sampler_inside_a_batch_sampler_of_the_users_is_seeded():
    class Pairs(BatchSampler):
        pass

    make = lambda: DataLoader(range(12), batch_sampler=Pairs(RandomSampler(range(12)), 2, drop_last=False))
    torch.manual_seed(1)
    first = global_order(make, 2, epochs=2)
    torch.manual_seed(2)
    assert global_order(make, 1, epochs=2) == first
    assert first[0] != first[1]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("collate", [None, torch.tensor])
def test_padding_is_marked_on_the_batch_that_has_it(workers, collate):
    """Rows are matched with the batch that is used, not with one that workers fetch ahead."""
    feed = Feed()
    loader = DataLoader(range(9), batch_size=2, num_workers=workers, collate_fn=collate)
    found = [(b.tolist(), feed.current_rows(), feed.begin_step()) for b in prepare(loader, 1, 2, feed=feed)]
    assert found == [([2, 3], Rows(2, 2), 2), ([6, 7], Rows(2, 2), 1), ([1, 2], Rows(2, 0), 0)]
    assert found[0][1] is found[1][1]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_batch_sampler_without_a_length_is_looked_ahead_and_filled(workers):
    """The last, shorter window is known when it begins."""
    feed = Feed(lookahead=2)
    loader = DataLoader(range(21), batch_sampler=Triples(21), num_workers=workers)
    found = [(b.tolist(), feed.current_rows().real, feed.begin_step()) for b in prepare(loader, 1, 2, feed=feed)]
    assert found == [([3, 4, 5], 3, 2), ([9, 10, 11], 3, 2), ([15, 16, 17], 3, 1), ([0, 1, 2], 0, 0)]


def test_only_the_sampler_is_looked_ahead():
    fetched = []

    class Watched(Told):
        def __getitem__(self, index):
            fetched.append(index)
            return index

    sampler = Triples(60)
    iterator = iter(prepare(DataLoader(Watched(60), batch_sampler=sampler), 0, 2, feed=Feed(3)))
    next(iterator)
    assert fetched == [0, 1, 2]
    assert 2 * 3 < sampler.asked < 14


@pytest.mark.parametrize("options", [
    {"num_workers": 2},
    {"num_workers": 2, "persistent_workers": True},
    {"num_workers": 1, "prefetch_factor": 5, "timeout": 30, "worker_init_fn": abs},
    {"collate_fn": torch.tensor},
    {"generator": torch.Generator()},
    {"num_workers": 1, "generator": torch.Generator()},
    {"num_workers": 1, "multiprocessing_context": "fork"},
])  # fmt: skip
def test_loader_settings_change_nothing_that_a_rank_reads(options):
    """Worker settings survive."""
    plain, other = (prepare(DataLoader(range(30), batch_size=4, **o), 1, 2) for o in ({}, options))
    assert [ids(plain), ids(plain)] == [ids(other), ids(other)]
    for name, value in options.items():
        if name not in ("generator", "multiprocessing_context"):
            assert getattr(other, name) == value


def test_the_original_is_not_changed():
    loader = DataLoader(range(9), batch_size=2, shuffle=True, num_workers=1)
    before = dict(vars(loader))
    prepared = prepare(loader, 0, 2)
    list(prepared)
    assert vars(loader) == before
    assert type(loader) is DataLoader
    assert isinstance(prepared, DataLoader)
    assert isinstance(prepared, DataLoaderShard)


def test_a_subclass_that_iterates_in_its_own_way_is_served():
    """A DataLoader subclass with its attributes."""
    feed = Feed()
    loader = prepare(WeirdLoader(range(5), batch_size=2, flavour="sweet"), 1, 2, feed=feed)
    assert loader.flavour == "sweet"
    assert type(loader).__name__ == "WeirdLoader"
    found = [(b.tolist(), feed.current_rows().real, feed.begin_step()) for b in loader]
    assert found == [([102, 103], 2, 1), ([101, 102], 0, 0)]
    assert len(ids(prepare(WeirdLoader(range(6), batch_size=2, repeat=2)))) == 6


def test_a_subclass_that_adds_batches_is_refused_when_ranks_share():
    with pytest.raises(RuntimeError, match="yielded more batches than it takes from super.*Yield one batch for each"):
        list(prepare(WeirdLoader(range(8), batch_size=2, repeat=2), 0, 2))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_subclass_that_ends_early_is_refused_when_ranks_share(workers):
    loader = prepare(WeirdLoader(range(8), batch_size=2, keep=1, num_workers=workers), 0, 2)
    with pytest.raises(RuntimeError, match="yielded fewer batches .*to end early, break in your loop"):
        list(loader)


def test_a_subclass_that_leaves_out_batches_is_refused_when_ranks_share():
    class Skipping(DataLoader):
        def __iter__(self):
            return itertools.islice(super().__iter__(), 1, None, 2)

    with pytest.raises(RuntimeError, match="yielded fewer batches than it takes from super"):
        list(prepare(Skipping(range(8), batch_size=2), 0, 2))


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_of_the_dataset_is_passed_on(workers):
    with pytest.raises(LookupError, match="broken sample"):
        list(prepare(DataLoader(Broken(), num_workers=workers), 0, 2))


def test_loaders_that_make_no_batches_are_served_in_a_world_of_one():
    """`batch_size=None`: its order too is a function of seed and epoch."""
    loader = prepare(DataLoader(range(6), batch_size=None, shuffle=True))
    torch.manual_seed(0)
    first = [list(loader), list(loader)]
    loader.set_epoch(0)
    torch.manual_seed(1)
    assert [list(loader), list(loader)] == first
    assert sorted(first[0]) == list(range(6))
    assert first[0] != first[1]
    assert len(loader) == 6


def test_batches_are_put_on_the_device():
    loader = prepare(DataLoader(range(3)), device=torch.device("meta"))
    assert {batch.device.type for batch in loader} == {"meta"}


@pytest.mark.parametrize("duplicate", [copy.deepcopy, copy.copy, lambda loader: pickle.loads(pickle.dumps(loader))])
@pytest.mark.parametrize("workers", [0, 1])
def test_copies_and_pickles_go_on_at_the_same_epoch(duplicate, workers):
    """Prepared loaders copy and pickle correctly, while an iterator lives."""
    make = lambda: DataLoader(Told(9), batch_size=2, shuffle=True, num_workers=workers)
    orders = [ids(loader) for loader in [prepare(make(), 1, 2)] for _ in range(2)]
    loader = prepare(make(), 1, 2)
    iterator = iter(loader)
    next(iterator)
    twin = duplicate(loader)
    assert isinstance(twin, DataLoaderShard)
    assert ids(twin) == orders[1]


@pytest.mark.parametrize("rank", [0, 1])
def test_loaders_without_batches_are_shared_out_element_by_element(rank):
    """`batch_size=None`."""
    feed = Feed()
    prepared = prepare(DataLoader([torch.arange(n) for n in (1, 2, 3)], batch_size=None), rank, 2, feed=feed)
    found = [(len(batch), feed.current_rows()) for batch in prepared]
    assert found == ([(1, None), (3, None)] if rank == 0 else [(2, None), (1, Rows(None, 0))])
    assert len(prepared) == 2


@pytest.mark.parametrize("rank", [0, 1])
def test_lists_of_indices_are_batches_where_the_loader_makes_none(rank):
    sampler = BatchSampler(SequentialSampler(range(5)), 2, drop_last=False)
    loader = DataLoader(Rows2(), sampler=sampler, batch_size=None)
    prepared = prepare(loader, rank, 2)
    assert [batch.tolist() for batch in prepared] == ([[0, 1], [4]] if rank == 0 else [[2, 3], [0, 1]])
    assert prepared.state_dict()["epoch"] == 1


class Wrapping:
    """A batch sampler that has another one inside, as those of libraries that group by shape."""

    def __init__(self, batch_sampler):
        self.batch_sampler = batch_sampler

    def __iter__(self):
        return iter(self.batch_sampler)


def divided():
    return DistributedSampler(range(9), num_replicas=2, rank=0)


def test_a_shard_of_a_batch_sampler_is_not_shared_out_again():
    shard = BatchSamplerShard(BatchSampler(SequentialSampler(range(9)), 2, drop_last=False), 2, 0)
    for given in (shard, Wrapping(shard)):
        with pytest.raises(
            ValueError, match="with a BatchSamplerShard for 2 processes: .*Give the loader the batch sampler"
        ):
            prepare(DataLoader(range(9), batch_sampler=given), 0, 2)


@pytest.mark.parametrize("make", [
    lambda: DataLoader(range(9), sampler=divided()),
    lambda: DataLoader(range(9), sampler=divided(), batch_size=None),
    lambda: DataLoader(range(9), sampler=BatchSampler(divided(), 2, drop_last=False), batch_size=None),
    lambda: DataLoader(range(9), batch_sampler=Wrapping(BatchSampler(divided(), 2, drop_last=False))),
    lambda: DataLoader(range(9), batch_sampler=BatchSamplerShard(BatchSampler(divided(), 2, drop_last=False), 1, 0)),
], ids=["batches", "no batches", "lists of indices", "wrapped", "shard of one"])  # fmt: skip
@pytest.mark.parametrize("options", [{}, {"dispatch_batches": True}], ids=["read", "dispatched"])
def test_a_sampler_that_shards_already_is_refused(make, options):
    with pytest.raises(
        ValueError, match="DistributedSampler for 2 replicas: .*Use shuffle=True instead of the sampler"
    ):
        prepare(make(), 0, 2, **options)


def test_batches_out_of_order_are_refused_unless_none_is_filled():
    options = {"batch_size": 2, "num_workers": 1, "in_order": False}
    with pytest.raises(ValueError, match="with in_order=False: .*Use in_order=True, or drop_last=True"):
        prepare(DataLoader(range(9), **options), 0, 2)
    assert ids(prepare(DataLoader(range(9), **options, drop_last=True), 0, 2)) == [[0, 1], [4, 5]]


@pytest.mark.parametrize("batch_sampler", [Triples(), [[0, 1], [2]]])
def test_batches_that_cannot_be_split_are_refused_at_once(batch_sampler):
    with pytest.raises(ValueError, match="split_batches=True cuts each batch into 2 equal pieces"):
        prepare(DataLoader(range(9), batch_sampler=batch_sampler), 0, 2, split_batches=True)


def test_a_prepared_loader_is_not_sharded_again():
    with pytest.raises(ValueError, match="prepared again, it would be sharded twice"):
        prepare(prepare(DataLoader(range(4)), 0, 2), 0, 2)
