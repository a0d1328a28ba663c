"""`prepare_data_loader`, and the classes of prepared loaders as one constructs them."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler

from accel_core import World
from accel_core.api.loader import PreparedLoader
from accel_data import (
    BatchSamplerShard,
    DataLoaderDispatcher,
    DataLoaderShard,
    SeedableRandomSampler,
    prepare_data_loader,
    skip_first_batches,
)
from accel_testing import assert_dies
from accel_testing.ranks import run_ranks

pytestmark = pytest.mark.timeout(120)
META = torch.device("meta")


class Stream(IterableDataset):
    def __init__(self, n):
        self.n = n

    def __iter__(self):
        return iter(range(self.n))


class Nodes:
    """A pipeline that keeps its own position."""

    def __init__(self):
        self.at = 0

    def __iter__(self):
        while self.at < 4:
            self.at += 1
            yield torch.tensor([self.at])
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


class MyLoader(DataLoader):
    def __init__(self, *args, label="mine", **kwargs):
        super().__init__(*args, **kwargs)
        self.label = label


class MyShard(DataLoaderShard):
    def total(self):
        return sum(int(batch.sum()) for batch in self)


class Mixin:
    pass


class MixedShard(DataLoaderShard, Mixin):
    pass


class MyDispatcher(DataLoaderDispatcher):
    pass


def ids(loader):
    return [batch.tolist() for batch in loader]


def by_process(**options):
    """What each of two processes reads, said to a world of one."""
    return [
        ids(prepare_data_loader(DataLoader(range(9), batch_size=2), num_processes=2, process_index=index, **options))
        for index in range(2)
    ]


def test_a_world_of_one_can_ask_for_the_part_of_any_process():
    assert by_process() == [[[0, 1], [4, 5], [8, 0]], [[2, 3], [6, 7], [1, 2]]]
    assert by_process(even_batches=False) == [[[0, 1], [4, 5], [8]], [[2, 3], [6, 7]]]
    assert by_process(split_batches=True) == [[[0], [2], [4], [6], [8]], [[1], [3], [5], [7], [0]]]


def test_all_processes_share_one_shuffled_order():
    loader = DataLoader(range(8), batch_size=2, shuffle=True)
    parts = [ids(prepare_data_loader(loader, num_processes=2, process_index=index)) for index in range(2)]
    order = [i for step in zip(*parts, strict=True) for batch in step for i in batch]
    assert order == [i for batch in ids(prepare_data_loader(loader)) for i in batch]
    assert sorted(order) == list(range(8))


def test_the_loader_is_not_changed_and_its_class_is_kept():
    loader = MyLoader(range(4), batch_size=2, label="kept")
    before = dict(loader.__dict__)
    prepared = prepare_data_loader(loader, num_processes=2, process_index=1)
    assert isinstance(prepared, MyLoader)
    assert isinstance(prepared, DataLoaderShard)
    assert prepared.label == "kept"
    assert ids(prepared) == [[2, 3]]
    assert loader.__dict__ == before


def test_batches_are_put_on_a_device_only_if_asked():
    loader = DataLoader(range(4), batch_size=2)
    devices = [
        [batch.device.type for batch in prepare_data_loader(loader, **options)]
        for options in ({}, {"device": META}, {"put_on_device": True}, {"device": META, "put_on_device": True})
    ]
    assert devices == [["cpu"] * 2, ["cpu"] * 2, [World.current().device.type] * 2, ["meta"] * 2]


def test_a_seedable_sampler_draws_by_randperm_from_seed_and_epoch():
    loader = DataLoader(range(10), batch_size=10, shuffle=True)
    prepared = prepare_data_loader(loader, use_seedable_sampler=True, data_seed=7)
    for epoch in range(3):
        expected = torch.randperm(10, generator=torch.Generator().manual_seed(7 + epoch)).tolist()
        assert ids(prepared) == [expected]
    assert type(loader.sampler) is RandomSampler


def test_a_data_seed_alone_decides_about_the_order():
    loader = DataLoader(range(10), batch_size=10, shuffle=True)
    with torch.random.fork_rng():
        orders = []
        for process_seed, data_seed in ((1, 7), (2, 7), (2, 8)):
            torch.manual_seed(process_seed)
            orders.append(ids(prepare_data_loader(loader, data_seed=data_seed)))
    assert orders[0] == orders[1] != orders[2]


def test_a_stream_with_a_state_of_its_own_is_used_as_it_is():
    prepared = prepare_data_loader(Nodes(), use_stateful_dataloader=True)
    iterator = iter(prepared)
    next(iterator)
    state = prepared.state_dict()
    resumed = prepare_data_loader(Nodes(), data_seed=state["seed"])
    resumed.load_state_dict(state)
    assert ids(resumed) == ids(iterator) == [[2], [3], [4]]
    assert ids(resumed) == [[1], [2], [3], [4]]


@pytest.mark.parametrize(("loader", "options", "error", "message"), [
    ([1, 2], {}, TypeError, r"prepare_data_loader\(\) was given a list, expected a torch\.utils\.data\.DataLoader"),
    (DataLoader(range(4)), {"rng_types": ["generators"]}, ValueError, "'generators'"),
    (DataLoader(range(4)), {"split_batches": "yes"}, TypeError, "expected True or False"),
    (DataLoader(range(4)), {"data_seed": -1}, ValueError, "out of range"),
    (DataLoader(range(4)), {"process_index": 2, "num_processes": 2}, ValueError, "names no part of the data"),
    (
        DataLoader(range(4), batch_size=3),
        {"process_index": 0, "num_processes": 2, "split_batches": True},
        ValueError,
        "batch_size=3 is not a multiple of 2",
    ),
    (
        DataLoader(range(4)),
        {"process_index": 1, "num_processes": 2, "dispatch_batches": True},
        ValueError,
        r"part 1 of 2 was asked for, and this is process 0 of 1. Leave num_processes and process_index out",
    ),
    (
        DataLoader(range(4), batch_sampler=BatchSamplerShard(BatchSampler(range(4), 2, False), 2, 0)),
        {"process_index": 1, "num_processes": 2},
        ValueError,
        r"prepare\(\) was given a DataLoader on 2 data-parallel ranks with a BatchSamplerShard for 2 processes",
    ),
    (DataLoaderShard(range(4)), {}, ValueError, "has been prepared already"),
    (DataLoaderDispatcher(range(4)), {}, ValueError, "has been prepared already"),
])  # fmt: skip
def test_what_cannot_be_prepared_is_refused(loader, options, error, message):
    with pytest.raises(error, match=message):
        prepare_data_loader(loader, **options)


CONSTRUCTED = {
    "shard": lambda **more: DataLoaderShard(range(10), batch_size=2, **more),
    "shard of a stream": lambda **more: DataLoaderShard(Stream(10), batch_size=2, **more),
    "dispatcher": lambda **more: DataLoaderDispatcher(range(10), batch_size=2, **more),
    "dispatcher of a stream": lambda **more: DataLoaderDispatcher(Stream(10), batch_size=2, **more),
    "split dispatcher": lambda **more: DataLoaderDispatcher(range(10), split_batches=True, batch_size=2, **more),
    "subclass": lambda **more: MyShard(range(10), batch_size=2, **more),
    "subclass with a mixin": lambda **more: MixedShard(range(10), batch_size=2, **more),
    "subclass of a dispatcher": lambda **more: MyDispatcher(range(10), batch_size=2, **more),
}
IN_ORDER = [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]


@pytest.mark.parametrize("kind", CONSTRUCTED)
def test_constructed_loaders_are_loaders_with_a_position(kind):
    loader = CONSTRUCTED[kind]()
    assert isinstance(loader, DataLoader)
    assert isinstance(loader, PreparedLoader)
    assert isinstance(loader, DataLoaderDispatcher if "dispatcher" in kind else DataLoaderShard)
    iterator = iter(loader)
    assert [next(iterator).tolist() for _ in range(2)] == IN_ORDER[:2]
    state = loader.state_dict()
    assert (state["epoch"], state["samples"]) == (0, 4)
    resumed = CONSTRUCTED[kind]()
    resumed.load_state_dict(state)
    assert ids(resumed) == ids(iterator) == IN_ORDER[2:]
    assert ids(resumed) == IN_ORDER


@pytest.mark.parametrize("twin_of", [
    copy.copy,
    copy.deepcopy,
    lambda loader: pickle.loads(pickle.dumps(loader)),
], ids=["copy", "deepcopy", "pickle"])  # fmt: skip
@pytest.mark.parametrize("kind", CONSTRUCTED)
def test_a_copy_goes_on_where_the_original_stands(kind, twin_of):
    loader = CONSTRUCTED[kind](shuffle=True) if "stream" not in kind else CONSTRUCTED[kind]()
    ids(loader)
    twin = twin_of(loader)
    assert type(twin) is type(loader)
    assert twin.state_dict() == loader.state_dict()
    twin_epoch = ids(twin)
    loader.set_epoch(1)
    assert twin_epoch == ids(loader)


@pytest.mark.parametrize("kind", CONSTRUCTED)
def test_constructed_loaders_leave_out_the_first_batches_of_each_iteration(kind):
    loader = CONSTRUCTED[kind](skip_batches=3)
    for _ in range(2):
        assert ids(loader) == IN_ORDER[3:]
    assert ids(skip_first_batches(loader, 1)) == IN_ORDER[4:]
    with pytest.raises(ValueError, match=r"skip_batches=-1\): expected how many batches are left out"):
        CONSTRUCTED[kind](skip_batches=-1)


def test_a_subclass_has_its_own_methods():
    assert MyShard(range(10), batch_size=2).total() == 45


def test_a_shard_puts_batches_on_its_device():
    assert [batch.device for batch in DataLoaderShard(range(4), device=META, batch_size=2)] == [META] * 2
    assert [batch.device.type for batch in DataLoaderShard(range(4), batch_size=2)] == ["cpu"] * 2


def test_a_dispatcher_drops_an_incomplete_last_batch_if_told():
    assert ids(DataLoaderDispatcher(range(5), _drop_last=True, batch_size=2)) == [[0, 1], [2, 3]]
    assert ids(DataLoaderDispatcher(range(5), drop_last=True, batch_size=2)) == [[0, 1], [2, 3]]


def test_a_shard_that_is_said_to_drop_the_last_batch_has_to():
    assert ids(DataLoaderShard(range(5), _drop_last=True, drop_last=True, batch_size=2)) == [[0, 1], [2, 3]]
    with pytest.raises(ValueError, match=r"DataLoaderShard\(_drop_last=True\) says.*Use drop_last=True"):
        DataLoaderShard(range(5), _drop_last=True, batch_size=2)


def test_a_shard_knows_the_padding_of_a_batch_sampler_shard():
    sampler = BatchSamplerShard(BatchSampler(SequentialSampler(range(9)), 2, drop_last=False), 2, 1)
    loader = DataLoaderShard(range(9), batch_sampler=sampler)
    feed = loader._accel_outlet.feed
    found = [(batch.tolist(), feed.current_rows().real) for batch in loader]
    assert found == [([2, 3], 2), ([6, 7], 2), ([1, 2], 0)]
    assert (len(loader), loader.total_batch_size, loader.total_dataset_length) == (3, 4, 9)


def test_rng_types_are_names():
    with pytest.raises(ValueError, match="'cude'"):
        DataLoaderShard(range(4), rng_types=["cude"])


@pytest.mark.parametrize(("make", "total", "steps", "words"), [
    (lambda: DataLoaderShard(range(9), batch_size=2), 2, 5, "every rank reads its own part"),
    (lambda: DataLoaderShard(Stream(9), batch_size=2), 2, None, "the stream is read here, whole"),
    (lambda: DataLoaderShard(Stream(9), batch_size=None), None, None, "batches come as the dataset gives them"),
    (lambda: DataLoaderDispatcher(range(9), batch_size=2), 2, 5, "one rank reads, and sends the others their parts"),
    (lambda: DataLoaderDispatcher(Stream(9), batch_size=2), 2, None, "one rank reads"),
    (
        lambda: prepare_data_loader(DataLoader(range(9), 2), num_processes=2, process_index=0),
        4,
        3,
        "filled from the first samples",
    ),
    (
        lambda: prepare_data_loader(DataLoader(range(9), 2), num_processes=2, process_index=0, split_batches=True),
        2,
        5,
        "filled from the first samples",
    ),
    (lambda: DataLoaderDispatcher(range(9), batch_size=2, drop_last=True), 2, 4, "is dropped"),
])  # fmt: skip
def test_describe_says_what_the_batch_size_is(make, total, steps, words):
    loader = make()
    description = loader.describe()
    assert (description.global_batch, description.steps) == (total, steps)
    assert loader.total_batch_size == total
    assert words in str(description)


def test_a_stream_has_no_total_length_and_no_number_of_batches():
    for loader in (DataLoaderShard(Stream(9)), DataLoaderDispatcher(Stream(9))):
        with pytest.raises(TypeError, match="total_dataset_length was asked for, but Stream has no length"):
            _ = loader.total_dataset_length
        with pytest.raises(TypeError, match="has no length. Give it"):
            len(loader)


@pytest.mark.parametrize("kind", CONSTRUCTED)
def test_a_loader_and_its_iterator_die_with_their_last_reference(kind):
    def broken_out():
        iterator = iter(CONSTRUCTED[kind]())
        next(iterator)
        return iterator

    assert_dies(lambda: CONSTRUCTED[kind]())
    assert_dies(broken_out)


def on_two_ranks():
    """Prepared without any argument, and constructed: what this rank reads."""
    world = World.current(cpu=True)
    generators = [torch.Generator().manual_seed(10 + world.rank) for _ in range(3)]
    given = RandomSampler(range(8), generator=generators[0])
    sampler = BatchSamplerShard(BatchSampler(range(9), 2, drop_last=False), world.size, world.rank)
    kinds = {
        "map": prepare_data_loader(DataLoader(range(9), batch_size=2)),
        "stream": prepare_data_loader(DataLoader(Stream(9), batch_size=2)),
        "shuffled": prepare_data_loader(DataLoader(range(8), batch_size=2, shuffle=True)),
        "seedable": prepare_data_loader(DataLoader(range(8), 2, shuffle=True), use_seedable_sampler=True, data_seed=3),
        "generator": prepare_data_loader(DataLoader(range(8), batch_size=2, sampler=given)),
        "dispatched": prepare_data_loader(DataLoader(range(8), batch_size=2, shuffle=True), dispatch_batches=True),
        "shard": DataLoaderShard(range(9), batch_sampler=sampler),
        "whole": DataLoaderShard(range(3), synchronized_generator=generators[1], rng_types=["generator"]),
        "apart": DataLoaderShard(range(3), synchronized_generator=generators[2], rng_types=[]),
        "dispatcher": DataLoaderDispatcher(range(9), batch_size=2),
        "skipping": DataLoaderDispatcher(Stream(9), skip_batches=1, batch_size=2),
        "dropping": DataLoaderDispatcher(range(9), _drop_last=True, batch_size=2),
    }
    found = {kind: ids(loader) for kind, loader in kinds.items()}
    found["deep copy"] = ids(copy.deepcopy(kinds["dispatcher"]))
    found["copy"] = ids(copy.copy(kinds["dispatcher"]))
    streams = [generator.get_state() for generator in generators[1:]]
    return found, streams, [str(kinds[kind].describe()) for kind in ("map", "stream", "dispatched")], refusals(world)


def refusals(world):
    found = []
    sampler = BatchSamplerShard(BatchSampler(range(8), 2, drop_last=False), 2, world.rank)
    for attempt in (
        lambda: prepare_data_loader(DataLoader(range(8)), process_index=1 - world.rank, dispatch_batches=True),
        lambda: prepare_data_loader(DataLoader(range(8)), data_seed=world.rank),
        lambda: DataLoaderDispatcher(range(8), split_batches=True, batch_size=3),
        lambda: DataLoaderDispatcher(range(8), batch_sampler=sampler),
    ):
        try:
            attempt()
        except ValueError as error:
            found.append(str(error))
    return found


@pytest.fixture(scope="module")
def ranks():
    return run_ranks(on_two_ranks, 2)


def test_processes_and_index_are_those_of_the_world(ranks):
    (first, _, _, _), (second, _, _, _) = ranks
    assert (first["map"], second["map"]) == ([[0, 1], [4, 5], [8, 0]], [[2, 3], [6, 7], [1, 2]])
    assert (first["stream"], second["stream"]) == ([[0, 1], [4, 5], [8]], [[2, 3], [6, 7], [0]])
    assert (first["shard"], second["shard"]) == (first["map"], second["map"])
    for kind in ("dispatcher", "deep copy", "copy"):
        assert (first[kind], second[kind]) == (first["stream"], second["stream"])
    assert (first["skipping"], second["skipping"]) == ([[4, 5], [8]], [[6, 7], [0]])  # as the stream from its beginning
    assert (first["dropping"], second["dropping"]) == ([[0, 1], [4, 5]], [[2, 3], [6, 7]])


def test_all_ranks_share_one_order(ranks):
    (first, _, _, _), (second, _, _, _) = ranks

    def order(kind):
        return [i for step in zip(first[kind], second[kind], strict=True) for batch in step for i in batch]

    for kind in ("shuffled", "generator", "dispatched"):
        assert sorted(order(kind)) == list(range(8)), kind
    assert order("dispatched") == order("shuffled")
    assert order("generator") == list(RandomSampler(range(8), generator=torch.Generator().manual_seed(10)))
    assert order("seedable") == list(SeedableRandomSampler(range(8), data_seed=3))


def test_a_synchronized_generator_is_that_of_rank_zero_if_it_is_among_the_rng_types(ranks):
    (_, (shared, apart), _, _), (_, (shared_there, apart_there), _, _) = ranks
    assert torch.equal(shared, shared_there)
    assert not torch.equal(apart, apart_there)


def test_descriptions_are_those_of_two_ranks(ranks):
    for _, _, (by_map, by_stream, by_dispatching), _ in ranks:
        assert "batch per rank 2, global batch 4 on 2 data-parallel rank(s)" in by_map
        assert "unknown steps per epoch" in by_stream
        assert "2 steps per epoch over 8 samples; an incomplete last global batch is split evenly" in by_dispatching


def test_all_ranks_refuse_what_cannot_be_shared_out(ranks):
    for _, _, _, refused in ranks:
        wrong_place, seeds, not_divisible, shared = refused
        assert "Leave num_processes and process_index out" in wrong_place
        assert "seed" in seeds
        assert "batch_size=3 is not a multiple of 2. Use batch_size=4" in not_divisible
        assert "DataLoaderDispatcher() was given a DataLoader on 2 data-parallel ranks with a Batch" in shared
