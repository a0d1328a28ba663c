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
    WeightedRandomSampler,
)

from accel_core import Feed, Shard
from accel_data import BatchSamplerShard, DataLoaderShard, SeedableRandomSampler, Sharded, skip_first_batches

N = 37


@pytest.mark.parametrize("seeded", [True, False])
def test_an_epoch_that_is_begun_again_has_its_order_and_one_that_has_ended_is_left(seeded):
    def loader():
        generator = None if seeded else torch.Generator().manual_seed(3)
        return prepare(DataLoader(list(range(N)), batch_size=4, shuffle=True, generator=generator))

    whole, states, one = [], [], loader()
    for batch in one:
        whole += batch.tolist()
        states.append(one.state_dict())
    for state, epoch in ((states[2], 0), (states[-1], 1)):
        resumed = loader()
        resumed.load_state_dict(state)
        resumed.restart_epoch()
        assert resumed.state_dict()["epoch"] == epoch
        found = torch.cat(list(resumed)).tolist()
        assert sorted(found) == list(range(N))
        assert epoch or found == whole
    left = loader()
    next(iter(left))
    left.restart_epoch()
    assert torch.cat(list(left)).tolist() == whole, "in the run itself, too"


class Unsized(IterableDataset):
    def __iter__(self):
        return iter(range(16))


def drawn(number, **options):
    return DataLoader(range(8), 4, sampler=WeightedRandomSampler(torch.ones(8), number), **options)


ENDS = {
    "a remainder is dropped": lambda: DataLoader(range(18), 4, shuffle=True, drop_last=True),
    "a part of the dataset": lambda: DataLoader(range(18), 4, sampler=SubsetRandomSampler(range(8))),
    "more than the dataset": lambda: drawn(18),
    "less than a batch is dropped": lambda: drawn(18, drop_last=True),
    "batches of the user's": lambda: DataLoader(range(50), batch_sampler=Varying()),
    "no batches": lambda: DataLoader(range(18), None, sampler=SubsetRandomSampler(range(6))),
    "lists of indices": lambda: DataLoader(torch.arange(18), None, sampler=BatchSampler(range(18), 4, True)),
    "a stream without a length": lambda: DataLoader(Unsized(), 4),
    "a stream whose remainder is dropped": lambda: DataLoader(Unsized(), 3, drop_last=True),
}


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("kind", ENDS)
def test_whether_an_epoch_has_ended_is_seen_by_its_last_batch(kind, ranks):
    """The dataset may be longer than an epoch, or shorter, or have no length."""

    def loader():
        return prepare(ENDS[kind](), 0, ranks, dispatch_batches=False)

    left, found = loader(), []
    states = [left.state_dict() for _ in left]
    for state in states:
        resumed = loader()
        resumed.load_state_dict(state)
        resumed.restart_epoch()
        found.append((resumed.state_dict()["epoch"], len(list(resumed))))
    assert found == [(0, len(states))] * (len(states) - 1) + [(1, len(states))]


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
    """Another seed is drawn in the new process, for neither run set one."""
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


@pytest.mark.parametrize(("saved_on", "resumed_on"), [(4, 2), (2, 1), (1, 4), (2, 3)])
@pytest.mark.parametrize("kind", ["shuffled", "a sampler's generator", "seedable", "own sampler"])
def test_any_number_of_ranks_goes_on_in_the_same_order(kind, saved_on, resumed_on):
    """No sample is lost and none repeated, also where the global batch is another one."""
    (whole,) = global_orders([prepare(LOADERS[kind]())])
    loaders = [prepare(LOADERS[kind](), rank, saved_on) for rank in range(saved_on)]
    iterators = [iter(loader) for loader in loaders]
    begun = [index for _ in range(2) for iterator in iterators for index in next(iterator).tolist()]
    states = [loader.state_dict() for loader in loaders]
    assert all(state["samples"] == len(begun) for state in states)
    resumed = [prepare(LOADERS[kind](), rank, resumed_on, seed=2**41) for rank in range(resumed_on)]
    for loader in resumed:
        loader.load_state_dict(states[-1])
    (rest,) = global_orders(resumed)
    assert begun + rest == whole


def global_orders(loaders, count=1):
    """The real samples of each epoch, rank after rank within each step."""
    orders = []
    for _ in range(count):
        order = []
        for step in itertools.zip_longest(*loaders):
            for loader, batch in zip(loaders, step, strict=True):
                rows = loader._accel_outlet.feed.current_rows()
                order += [] if batch is None else batch.tolist()[: rows.real]
        orders.append(order)
    return orders


@pytest.mark.parametrize("kind", LOADERS)
def test_skipping_leaves_out_the_beginning_and_the_next_epoch_is_whole(kind):
    whole = epochs(prepare(LOADERS[kind]()), 2)
    loader = prepare(LOADERS[kind]())
    assert epochs(skip_first_batches(loader, 3), 1) == [whole[0][3:]]
    assert epochs(loader, 1) == [whole[1]]
    assert epochs(skip_first_batches(prepare(LOADERS[kind]()), 1000), 1) == [[]]


def test_a_skipped_loader_is_shorter_and_says_where_it_is():
    loader = skip_first_batches(prepare(LOADERS["shuffled"](), 0, 2), 2)
    assert len(loader) == len(list(copy.copy(loader))) == 3
    iterator = iter(loader)
    next(iterator)
    assert loader.state_dict()["samples"] == 24


@pytest.mark.parametrize("number", [-1, 1.5, True])
def test_a_wrong_number_of_skipped_batches_is_refused(number):
    with pytest.raises(ValueError, match=r"skip_first_batches\(num_batches=.*: expected how many batches are left out"):
        skip_first_batches(prepare(LOADERS["shuffled"]()), number)


class Counting(torch.utils.data.Dataset):
    """Says what was read of a billion samples."""

    def __init__(self):
        self.read = []

    def __len__(self):
        return 10**9

    def __getitem__(self, index):
        self.read.append(index)
        return index


@pytest.mark.parametrize("resume", ["state", "skip"])
def test_resuming_at_batch_one_million_reads_no_skipped_sample(resume):
    dataset = Counting()
    loader = prepare(DataLoader(dataset, batch_size=8, shuffle=True), seed=7)
    if resume == "state":
        loader.load_state_dict({**loader.state_dict(), "samples": 8 * 10**6})
    else:
        loader = skip_first_batches(loader, 10**6)
    batch = next(iter(loader)).tolist()
    assert dataset.read == batch
    assert loader.state_dict()["samples"] == 8 * 10**6 + 8


def test_a_chosen_epoch_keeps_the_position_of_its_own_and_gives_up_another():
    loader = prepare(LOADERS["shuffled"]())
    whole = epochs(loader, 2)
    state = {**prepare(LOADERS["shuffled"]()).state_dict(), "epoch": 1, "samples": 8}
    loader.load_state_dict(state)
    loader.set_epoch(1)
    assert epochs(loader, 1) == [whole[1][2:]]
    loader.load_state_dict(state)
    with pytest.warns(UserWarning, match=r"loader\.set_epoch\(0\) gives up the position that was loaded: epoch 1, 8"):
        loader.set_epoch(0)
    assert epochs(loader, 1) == [whole[0]]


STATE = {"version": 1, "seed": 5, "loader": 0, "epoch": 0, "samples": 4, "length": N, "workers": None}
STATE["order"] = "BatchSampler of RandomSampler"


@pytest.mark.parametrize(("change", "message"), [
    ({"length": N + 1}, "the state of a dataset with 38 samples; this loader's has 37"),
    ({"length": None}, "the state of a dataset with no known length"),
    ({"loader": 1}, "the state of loader 1, .*this is loader 0.*Prepare the loaders in the same order"),
    ({"seed": 6}, r"a state of a run with seed 6, this run has seed 5.*Type set_seed\(6\)"),
    ({"version": 2}, "a state of version 2; this accel-data reads version 1"),
    ({"order": "BatchSampler of SequentialSampler"}, "a position in the order of BatchSampler of SequentialSampler"),
    ({"workers": 2}, r"the order that 2 worker\(s\) make of an IterableDataset, this loader has None"),
])  # fmt: skip
def test_a_state_of_another_loader_dataset_or_run_is_refused(change, message):
    loader = prepare(LOADERS["shuffled"](), seed=5)
    with pytest.raises(ValueError, match=message):
        loader.load_state_dict({**STATE, **change})
    loader.load_state_dict(STATE)


@pytest.mark.parametrize(
    "state", [None, {}, {**STATE, "samples": "4"}, {**STATE, "epoch": True}, {**STATE, "samples": -4}]
)
def test_what_is_no_state_of_a_loader_is_refused(state):
    with pytest.raises(TypeError, match="that is no state of a loader: it needs whole numbers seed, loader"):
        prepare(LOADERS["shuffled"](), seed=5).load_state_dict(state)


@pytest.mark.parametrize(("saved", "resumed"), [(5, 2**40), (2**40, 5)])
def test_a_seed_that_nobody_chose_gives_way_to_that_of_the_state(saved, resumed):
    loader = prepare(LOADERS["shuffled"](), seed=resumed)
    loader.load_state_dict({**STATE, "seed": saved})
    assert loader.state_dict()["seed"] == saved


def test_a_position_inside_a_batch_of_the_users_batch_sampler_is_refused():
    loader = prepare(LOADERS["own batch sampler"]())
    loader.load_state_dict({**loader.state_dict(), "samples": 2})
    with pytest.raises(
        ValueError, match="behind 2 samples was loaded, which lies inside a batch of Varying: .*at 0 and 3"
    ):
        next(iter(loader))


def test_a_position_behind_the_end_of_the_users_sampler_is_refused():
    loader = prepare(LOADERS["own batch sampler"]())
    loader.load_state_dict({**loader.state_dict(), "samples": 1000})
    with pytest.raises(ValueError, match="behind 1000 samples was loaded, but Varying yields only 37 in this epoch"):
        next(iter(loader))


def test_a_position_inside_a_batch_of_a_stream_is_refused():
    loader = prepare(LOADERS["stream"]())
    loader.load_state_dict({**loader.state_dict(), "samples": 6})
    with pytest.raises(
        ValueError, match="behind 6 samples was loaded, which lies inside a batch of 4: a stream is left"
    ):
        iter(loader)


def test_a_state_with_other_generators_is_refused():
    saved = prepare(LOADERS["a generator"]()).state_dict()
    saved["generators"]["states"] *= 2
    with pytest.raises(ValueError, match="a state with 2 generators of a sampler or dataset, this loader's has 1"):
        prepare(LOADERS["a generator"]()).load_state_dict(saved)


def test_batches_out_of_order_have_no_position():
    loader = prepare(DataLoader(range(9), batch_size=2, num_workers=1, in_order=False))
    with pytest.raises(
        ValueError, match="a loader with in_order=False: what it has yielded is no beginning of the order"
    ):
        loader.state_dict()


class Joining(DataLoader):
    """Joins two batches, and leaves out the third."""

    def __iter__(self):
        batches = super().__iter__()
        for first in batches:
            yield torch.cat([first, next(batches, first[:0])])
            next(batches, None)


class Careless(DataLoader):
    """Never asks for torch's batches."""

    def __iter__(self):
        return iter([torch.tensor([0, 1])])


@pytest.mark.parametrize("options", [{}, {"num_workers": 1}, {"num_workers": 2, "persistent_workers": True}])
def test_a_class_that_joins_batches_resumes_behind_what_torch_delivered(options):
    """What workers have fetched ahead does not count."""

    def make():
        return prepare(Joining(range(N), batch_size=2, shuffle=True, **options))

    (order,) = epochs(prepare(DataLoader(range(N), batch_size=N, shuffle=True)), 1)
    loader = make()
    iterator = iter(loader)
    assert [next(iterator).tolist() for _ in range(2)] == [order[0][:4], order[0][6:10]]
    state = loader.state_dict()
    assert state["samples"] == 10
    del iterator
    resumed = make()
    resumed.load_state_dict(state)
    assert next(iter(resumed)).tolist() == order[0][10:14]


def test_a_class_that_never_asks_for_batches_has_no_position():
    loader = prepare(Careless(range(N), batch_size=2))
    assert epochs(loader, 1) == [[[0, 1]]]
    with pytest.raises(
        ValueError, match=r"whose __iter__ yields batches without taking any from super\(\).__iter__\(\)"
    ):
        loader.state_dict()


def test_a_constructed_loader_over_a_shard_knows_its_padding_and_its_position():

    def make(rank):
        sampler = BatchSamplerShard(BatchSampler(SequentialSampler(range(7)), 2, drop_last=False), 2, rank)
        return DataLoaderShard(range(7), batch_sampler=sampler)

    loader = make(1)
    feed: Feed = loader._accel_outlet.feed
    assert [(batch.tolist(), feed.current_rows().real) for batch in loader] == [([2, 3], 2), ([6, 0], 1)]
    assert loader.total_batch_size == 4
    assert isinstance(loader, DataLoader)
    resumed = make(1)
    resumed.load_state_dict({**loader.state_dict(), "epoch": 0, "samples": 4})
    assert [batch.tolist() for batch in resumed] == [[6, 0]]


class Halved(Joining):
    def __len__(self):
        return super().__len__() // 3 + 1


@pytest.mark.parametrize("rank", [0, 1])
def test_a_class_that_counts_its_batches_is_believed(rank):
    """What it asks torch for is the number of this rank."""
    assert len(prepare(Halved(range(24), batch_size=2), rank, 2)) == 6 // 3 + 1


class Failing(IterableDataset):
    def __iter__(self):
        yield from range(4)
        raise LookupError("sample 4 is broken")


def test_what_was_read_before_an_error_is_yielded():
    iterator = iter(prepare(DataLoader(Failing(), batch_size=2)))
    assert [next(iterator).tolist() for _ in range(2)] == [[0, 1], [2, 3]]
    with pytest.raises(LookupError, match="sample 4 is broken"):
        next(iterator)


def test_a_position_that_was_loaded_is_what_the_state_says():
    """Also where it came from a rank that does not know the state of the dataset."""
    loader = prepare(LOADERS["stateful stream"]())
    state = {**loader.state_dict(), "samples": 4}
    del state["stream"]
    loader.load_state_dict(state)
    assert loader.state_dict() == state
    assert epochs(loader, 1)[0][0] == [4, 5, 6, 7]


@pytest.mark.parametrize("kind", ["stream with epochs", "a generator"])
def test_workers_that_persist_are_told_the_epoch_and_resume(kind):
    """They keep the copy of the dataset that they were started with."""

    def make():
        return prepare(LOADERS[kind](num_workers=1, persistent_workers=True))

    whole = epochs(make(), 4)
    assert whole[0] != whole[1]
    saved = make()
    epochs(saved, 1)
    between = saved.state_dict()
    iterator = iter(saved)
    unadvanced = saved.state_dict()
    begun = [as_list(batch) for batch in itertools.islice(iterator, 3)]
    assert begun == whole[1][:3]
    inside = saved.state_dict()
    for state, expected in ((between, whole[1:3]), (unadvanced, whole[1:3]), (inside, [whole[1][3:], whole[2]])):
        resumed = make()
        resumed.load_state_dict(state)
        assert epochs(resumed, 2) == expected


class Paced(StatefulStream):
    """Its state holds its epoch."""

    def __init__(self):
        super().__init__()
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        return (1000 * self.epoch + sample % 100 for sample in super().__iter__())

    def state_dict(self):
        return {**super().state_dict(), "epoch": self.epoch}

    def load_state_dict(self, state):
        super().load_state_dict(state)
        self.epoch = state["epoch"]


@pytest.mark.parametrize("steps", [3, 10, 11])
def test_a_dataset_whose_state_holds_its_epoch_is_told_the_next_one(steps):
    whole = epochs(prepare(DataLoader(Paced(), batch_size=4)), 3)
    saved = prepare(DataLoader(Paced(), batch_size=4))
    for _ in itertools.islice(saved, steps):
        pass
    if steps > 10:
        epochs(saved, 1)
    resumed = prepare(DataLoader(Paced(), batch_size=4))
    resumed.load_state_dict(saved.state_dict())
    expected = whole[2:] if steps > 10 else [whole[0][steps:], whole[1]]
    assert epochs(resumed, len(expected)) == expected


def test_streams_that_split_themselves_are_not_resumed_whole():
    saved = Sharded(dispatch_batches=False).prepare_loader(
        DataLoader(Stream(), batch_size=4), Shard(0, 2), Feed(), None, 2**40
    )
    state = {**saved.state_dict(), "samples": 16, "lanes": [8, 8]}
    with pytest.raises(ValueError, match="in the 2 streams of a dataset that splits itself over its workers"):
        prepare(DataLoader(Stream(), batch_size=4, num_workers=2)).load_state_dict(state)
    del state["lanes"]
    prepare(DataLoader(Stream(), batch_size=4)).load_state_dict(state)
