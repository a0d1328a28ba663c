"""The core's own loader, for a world of one: torch's batches, placed and reported."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections import Counter, namedtuple
from collections.abc import Callable

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)
from torch.utils.data._utils.collate import default_collate_fn_map

from accel_core.contract.loader_progress import Feed, Rows
from accel_core.loading.index_source import looked_ahead
from accel_core.loading.prepared_loader import PreparedLoader, prepare_local_loader

CPU = torch.device("cpu")
Point = namedtuple("Point", ["x", "y"])


class Samples(Dataset):
    """Map-style, one sample per call of `make`."""

    def __init__(self, make: Callable[[int], object], count: int = 7):
        self.make = make
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return self.make(index)


class InBatches(Samples):
    def __getitems__(self, indices):
        return [self.make(index) for index in indices]


class Stream(IterableDataset):
    def __init__(self, count):
        self.count = count

    def __iter__(self):
        return iter(range(self.count))


class Triples(Sampler):
    """A batch sampler without a length."""

    def __init__(self, count):
        self.count = count
        self.asked = 0

    def __iter__(self):
        for start in range(0, self.count, 3):
            self.asked += 1
            yield list(range(start, min(start + 3, self.count)))


class DoublingLoader(DataLoader):
    """Yields every batch twice, and has an attribute of its own."""

    def __init__(self, *args, flavour="none", **kwargs):
        super().__init__(*args, **kwargs)
        self.flavour = flavour
        self.rounds = 0

    def __iter__(self):
        self.rounds += 1
        for batch in super().__iter__():
            yield batch
            yield batch


def reports(loader, feed):
    """What the feed knows while each batch is used: the batches, those that remain, and the rows."""
    batches, remaining, rows = [], [], []
    for batch in loader:
        batches.append(batch)
        remaining.append(feed.begin_step())
        rows.append(feed.current_rows())
    return batches, remaining, rows


def assert_same(ours, theirs):
    """Equal in types, structure, dtypes, strides and every bit."""
    assert type(ours) is type(theirs)
    if isinstance(theirs, torch.Tensor):
        assert (ours.dtype, ours.stride()) == (theirs.dtype, theirs.stride())
        assert torch.equal(ours, theirs)
        assert (ours.grad_fn is None) == (theirs.grad_fn is None)
    elif isinstance(theirs, dict):
        assert list(ours) == list(theirs)
        for key in theirs:
            assert_same(ours[key], theirs[key])
    elif isinstance(theirs, (list, tuple)):
        assert len(ours) == len(theirs)
        for our, their in zip(ours, theirs, strict=True):
            assert_same(our, their)
    else:
        assert ours == theirs


def assert_like_torch(loader, epochs=2):
    """The same batches as torch's loader, and the same state of the global generator after each epoch."""
    prepared = prepare_local_loader(loader, Feed(), CPU)
    for seed in range(epochs):
        torch.manual_seed(seed)
        theirs = list(loader)
        state = torch.get_rng_state()
        torch.manual_seed(seed)
        assert_same(list(prepared), theirs)
        assert torch.equal(torch.get_rng_state(), state)


def tensor(index):
    return torch.arange(3.0) + index


MAKERS = {
    "dict": lambda i: {"x": tensor(i), "y": tensor(i).long()},
    "tuple": lambda i: (tensor(i), torch.tensor(i)),
    "list": lambda i: [tensor(i), torch.tensor(i)],
    "tensor": tensor,
    "named tuple": lambda i: Point(tensor(i), i),
    "nested": lambda i: {"x": (tensor(i), {"z": tensor(i)}), "name": str(i)},
    "numbers": lambda i: (i, float(i), "text"),
    "mixed dict": lambda i: {"x": tensor(i), "n": i},
    "counter": lambda i: Counter({"x": i}),
    "half": lambda i: {"x": tensor(i).half(), "m": torch.tensor(i % 2 == 0)},
    "transposed": lambda i: (torch.arange(6.0).view(2, 3).t() + i,),
    "with a gradient": lambda i: (tensor(i).requires_grad_(),),
    "empty": lambda i: (torch.empty(0),),
    "different keys": lambda i: {"x": tensor(i), **({"extra": tensor(i)} if i % 2 else {})},
}


@pytest.mark.parametrize("kind", [Samples, InBatches])
@pytest.mark.parametrize("maker", MAKERS)
def test_batches_are_torchs_bit_for_bit(maker, kind):
    """The bare loop gives what torch's loader gives."""
    try:
        assert_like_torch(DataLoader(kind(MAKERS[maker]), batch_size=3))
    except KeyError:
        assert maker == "different keys"


@pytest.mark.parametrize("options", [{}, {"drop_last": True}, {"shuffle": True}, {"batch_size": 1}])
def test_every_option_of_a_plain_loader_is_honoured(options):
    assert_like_torch(DataLoader(Samples(MAKERS["dict"]), **{"batch_size": 3, **options}))


@pytest.mark.parametrize(
    "data",
    [
        torch.arange(14.0).view(7, 2),
        torch.arange(7),
        torch.arange(14.0).view(2, 7).t(),
        torch.zeros(7, 3, 2, 2).to(memory_format=torch.channels_last),
        torch.ones(7, 2, requires_grad=True),
        torch.ones(7, dtype=torch.complex64).conj(),
    ],
    ids=["matrix", "vector", "transposed", "channels last", "with a gradient", "conjugated"],
)
def test_tensor_datasets_give_torchs_batches(data):
    assert_like_torch(DataLoader(TensorDataset(data, torch.arange(7)), batch_size=3, shuffle=True))
    assert_like_torch(DataLoader(Subset(TensorDataset(data, torch.arange(7)), [5, 1, 1, 2]), batch_size=3))


def test_negative_indices_reach_a_tensor_dataset():
    assert_like_torch(DataLoader(TensorDataset(torch.arange(5)), batch_sampler=[[0, -1], [-2, 1]]))


def test_shuffling_with_a_generator_draws_what_torch_draws():
    loader = DataLoader(range(9), batch_size=2, shuffle=True, generator=torch.Generator())
    prepared = prepare_local_loader(loader, Feed(), None)
    loader.generator.manual_seed(3)
    theirs = [list(loader), list(loader)]
    loader.generator.manual_seed(3)
    assert_same([list(prepared), list(prepared)], theirs)


def test_random_augmentation_meets_the_same_stream_as_with_torch():
    loader = DataLoader(Samples(lambda i: (torch.rand(2) + i,)), batch_size=2, shuffle=True)
    assert_like_torch(loader)


@pytest.mark.parametrize(
    "make",
    [
        lambda i: (torch.zeros(i + 1),),
        lambda i: {"x": torch.zeros(i + 1)},
        lambda i: (torch.zeros(1),) * (i + 1),
        lambda i: {"x": torch.zeros(1)} if i == 0 else {"y": torch.zeros(1)},
        lambda i: (torch.zeros(1), object()),
        lambda i: (torch.zeros(1).to_sparse(),),
        lambda i: (torch.nested.nested_tensor([torch.zeros(1)]),),
        lambda i: (3 if i else torch.zeros(1),),
    ],
    ids=["ragged tuple", "ragged dict", "lengths", "keys", "object", "sparse", "nested", "changing type"],
)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
def test_what_torch_cannot_collate_is_refused_by_torch(make):
    loader = DataLoader(Samples(make), batch_size=2)
    with pytest.raises(Exception) as theirs:
        list(loader)
    with pytest.raises(type(theirs.value)) as ours:
        list(prepare_local_loader(loader, Feed(), CPU))
    assert str(ours.value) == str(theirs.value)


@pytest.mark.parametrize("kind", [torch.Tensor, tuple, dict])
def test_a_collation_that_the_user_registered_is_used(kind, monkeypatch):
    monkeypatch.setitem(default_collate_fn_map, kind, lambda batch, *, collate_fn_map: "mine")
    maker = MAKERS["dict"] if kind is dict else MAKERS["tuple"]
    assert_like_torch(DataLoader(Samples(maker), batch_size=2))
    assert_like_torch(DataLoader(TensorDataset(torch.arange(4)), batch_size=2))


@pytest.mark.parametrize("dataset", [Samples(lambda i: i, 3), TensorDataset(torch.arange(3))])
def test_an_error_of_the_dataset_is_passed_on(dataset):
    class Failing(Samples):
        def __getitem__(self, index):
            raise LookupError("broken sample")

    feed = Feed()
    with pytest.raises(LookupError, match="broken sample"):
        list(prepare_local_loader(DataLoader(Failing(tensor)), feed, CPU))
    assert feed.begin_step() is None
    with pytest.raises(IndexError):
        list(prepare_local_loader(DataLoader(TensorDataset(torch.arange(3)), batch_sampler=[[7]]), feed, CPU))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("collate", [None, torch.tensor])
def test_every_batch_is_reported_with_what_remains_and_its_rows(workers, collate):
    """The end is known at the last batch, also when workers fetch ahead."""
    feed = Feed()
    loader = DataLoader(range(7), batch_size=3, num_workers=workers, collate_fn=collate)
    batches, remaining, rows = reports(prepare_local_loader(loader, feed, CPU), feed)
    assert [batch.tolist() for batch in batches] == [[0, 1, 2], [3, 4, 5], [6]]
    assert remaining == [2, 1, 0]
    assert rows == [Rows(3, 3), Rows(3, 3), Rows(1, 1)]
    assert rows[0] is rows[1]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_batch_sampler_without_a_length_is_looked_ahead_in_the_sampler(workers):
    """One window is looked ahead, and no data for it."""
    fetched = []
    dataset = Samples(lambda i: fetched.append(i) or i, 12)
    feed = Feed(lookahead=2)
    sampler = Triples(12)
    loader = prepare_local_loader(DataLoader(dataset, batch_sampler=sampler, num_workers=workers), feed, CPU)
    iterator = iter(loader)
    next(iterator)
    assert sampler.asked >= 3
    assert fetched == ([] if workers else [0, 1, 2])
    assert [feed.begin_step(), *(feed.begin_step() for _ in iterator)] == [2, 2, 1, 0]
    with pytest.raises(TypeError, match="no len"):
        len(loader)


def test_a_length_that_is_only_an_estimate_does_not_move_the_end():
    class Estimating(Triples):
        def __len__(self):
            return 9

    feed = Feed()
    loader = prepare_local_loader(DataLoader(range(12), batch_sampler=Estimating(12)), feed, None)
    assert reports(loader, feed)[1] == [8, 7, 6, 0]


@pytest.mark.parametrize("make", [lambda: (iter([0, 1]) for _ in range(2)), lambda: [(0, 1), (0, 1)]])
def test_any_iterable_of_index_batches_is_a_batch_sampler(make):
    """A minimal batch sampler."""
    feed = Feed()
    prepared = prepare_local_loader(DataLoader(range(2), batch_sampler=make()), feed, None)
    batches, remaining, rows = reports(prepared, feed)
    assert [batch.tolist() for batch in batches] == [[0, 1], [0, 1]]
    assert (remaining, rows) == ([1, 0], [Rows(2, 2)] * 2)


@pytest.mark.parametrize(("lookahead", "expected"), [(1, [1, 1, 0]), (2, [2, 1, 0]), (5, [2, 1, 0])])
@pytest.mark.parametrize("workers", [0, 1])
def test_iterable_sets_are_looked_ahead_in_the_data(lookahead, expected, workers):
    feed = Feed(lookahead)
    loader = prepare_local_loader(DataLoader(Stream(5), batch_size=2, num_workers=workers), feed, CPU)
    batches, remaining, rows = reports(loader, feed)
    assert [batch.tolist() for batch in batches] == [[0, 1], [2, 3], [4]]
    assert (remaining, rows) == (expected, [None] * 3)


@pytest.mark.parametrize("dataset", [range(3), Stream(3)])
def test_loaders_that_make_no_batches_are_served(dataset):
    """Batch_size=None."""
    feed = Feed()
    loader = prepare_local_loader(DataLoader(dataset, batch_size=None), feed, CPU)
    assert reports(loader, feed) == ([0, 1, 2], [1, 1, 0] if isinstance(dataset, Stream) else [2, 1, 0], [None] * 3)


def test_a_subclass_keeps_its_class_its_attributes_and_its_own_way_to_iterate():
    """A DataLoader subclass with its attributes survives."""
    feed = Feed()
    loader = DoublingLoader(range(4), batch_size=2, flavour="sweet")
    prepared = prepare_local_loader(loader, feed, CPU)
    assert isinstance(prepared, DoublingLoader)
    assert type(prepared).__name__ == "DoublingLoader"
    batches, remaining, _ = reports(prepared, feed)
    assert [batch.tolist() for batch in batches] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert remaining == [1, 1, 1, 0]
    assert (prepared.flavour, prepared.rounds, loader.rounds) == ("sweet", 1, 0)


def test_worker_settings_are_kept_and_the_original_is_not_changed():
    """Worker settings survive; the original is not mutated."""
    loader = DataLoader(
        range(4),
        batch_size=2,
        num_workers=1,
        persistent_workers=True,
        prefetch_factor=3,
        timeout=7,
        worker_init_fn=print,
        generator=torch.Generator(),
        multiprocessing_context="fork",
    )
    before = dict(vars(loader))
    prepared = prepare_local_loader(loader, Feed(), CPU)
    list(prepared)
    assert vars(loader) == before
    assert type(loader) is DataLoader
    kept = set(before) - {"batch_sampler", "_iterator"}
    assert {name: vars(prepared)[name] for name in kept} == {name: before[name] for name in kept}
    assert (prepared.batch_sampler.batch_size, prepared.batch_sampler.sampler) == (2, loader.sampler)
    with pytest.raises(AttributeError, match="speed"):
        prepared.batch_sampler.speed


def test_persistent_workers_live_on_and_are_not_shared_with_the_original():
    loader = DataLoader(range(4), batch_size=2, num_workers=1, persistent_workers=True)
    list(loader)
    prepared = prepare_local_loader(loader, Feed(), CPU)
    assert [len(list(prepared)) for _ in range(2)] == [2, 2]
    assert prepared._iterator is not None
    assert prepared._iterator is not loader._iterator


def test_batches_that_arrive_out_of_order_have_no_rows():
    feed = Feed()
    loader = DataLoader(range(3), batch_size=2, num_workers=1, in_order=False)
    _, remaining, rows = reports(prepare_local_loader(loader, feed, CPU), feed)
    assert (remaining, rows) == ([1, 0], [None, None])


def test_batches_are_put_on_the_device_unless_there_is_none():
    meta = torch.device("meta")
    for options in ({}, {"collate_fn": lambda samples: default_collate(samples)}):
        loader = DataLoader(Samples(MAKERS["dict"]), batch_size=3, **options)
        assert {b["x"].device for b in prepare_local_loader(loader, Feed(), meta)} == {meta}
        assert {b["x"].device for b in prepare_local_loader(loader, Feed(), None)} == {CPU}
    stream = prepare_local_loader(DataLoader(Stream(2)), Feed(), meta)
    assert {batch.device for batch in stream} == {meta}


def test_an_iterator_that_is_dropped_leaves_the_feed():
    feed = Feed()
    iterator = iter(prepare_local_loader(DataLoader(range(4)), feed, CPU))
    assert feed.begin_step() is None
    next(iterator)
    assert feed.begin_step() == 3
    next(iterator)
    del iterator
    assert feed.begin_step() is None
    assert feed.current_rows() == Rows(1, 1)


def test_loaders_can_be_nested_and_zipped():
    feed = Feed()
    loader = prepare_local_loader(DataLoader(range(4), batch_size=2), feed, CPU)
    pairs = [(a.tolist(), b.tolist()) for a in loader for b in loader]
    assert len(pairs) == 4
    assert [(a.tolist(), b.tolist()) for a, b in zip(loader, loader, strict=True)] == [([0, 1],) * 2, ([2, 3],) * 2]


def sample(index):
    return (torch.tensor(index),)


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy])
def test_a_copy_reports_to_the_same_feed(duplicate):
    """Prepared loaders copy correctly."""
    feed = Feed()
    prepared = prepare_local_loader(DoublingLoader(Samples(sample), batch_size=4, flavour="sour"), feed, CPU)
    twin = duplicate(prepared)
    assert isinstance(twin, PreparedLoader)
    assert isinstance(twin, DoublingLoader)
    assert twin.flavour == "sour"
    assert reports(twin, feed)[1] == [1, 1, 1, 0]
    assert (twin.dataset is prepared.dataset) == (duplicate is copy.copy)


def test_a_pickled_loader_yields_the_same_and_reports_to_a_feed_of_its_own():
    """Prepared loaders pickle, also while workers run and iterators live."""
    feed = Feed(lookahead=3)
    loader = DataLoader(Samples(sample), batch_size=4, num_workers=1, persistent_workers=True)
    prepared = prepare_local_loader(loader, feed, CPU)
    iterator = iter(prepared)
    next(iterator)
    twin = pickle.loads(pickle.dumps(prepared))
    assert isinstance(twin, PreparedLoader)
    assert type(twin) is type(prepared)
    feed.begin_step()
    assert_same(list(twin), list(loader))
    assert feed.begin_step() is None
    assert twin._accel_outlet.feed.lookahead == 3


def test_a_state_that_the_users_class_chooses_is_pickled():
    twin = pickle.loads(pickle.dumps(prepare_local_loader(Choosing(range(2)), Feed(), None)))
    assert twin.chosen == "yes"
    assert len(list(twin)) == 2


class Choosing(DataLoader):
    def __getstate__(self):
        return {**self.__dict__, "chosen": "yes"}


def test_one_class_serves_all_loaders_of_a_class_and_nothing_is_kept_alive():
    """No table of ours keeps a user's class or loader alive."""
    loaders = [prepare_local_loader(DataLoader(range(2)), Feed(), CPU) for _ in range(2)]
    assert type(loaders[0]) is type(loaders[1])

    class Local(DataLoader):
        pass

    prepared = prepare_local_loader(Local(range(2)), Feed(), CPU)
    list(prepared)
    references = [weakref.ref(Local), weakref.ref(prepared)]
    del Local, prepared
    gc.collect()
    assert [reference() for reference in references] == [None, None]


def test_a_prepared_loader_is_not_prepared_again():
    prepared = prepare_local_loader(DataLoader(range(2)), Feed(), CPU)
    with pytest.raises(ValueError, match="has been prepared already.*Pass the loader that you built"):
        prepare_local_loader(prepared, Feed(), CPU)


def test_lengths_are_torchs():
    for loader in (DataLoader(range(7), batch_size=3), DataLoader(range(7), batch_size=None)):
        assert len(prepare_local_loader(loader, Feed(), None)) == len(loader)


def test_profiles_show_the_fetching_of_batches_under_torchs_name():
    prepared = prepare_local_loader(DataLoader(range(4), batch_size=2), Feed(), None)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        list(prepared)
    [event] = [e for e in profile.key_averages() if e.key.startswith("enumerate(DataLoader)")]
    assert event.count == 2


def test_torchs_other_samplers_are_followed():
    sampler = WeightedRandomSampler([1.0, 2.0, 3.0], 5)
    assert_like_torch(DataLoader(range(3), batch_size=2, sampler=sampler))
    assert_like_torch(DataLoader(range(3), batch_sampler=BatchSampler(RandomSampler(range(3)), 2, drop_last=False)))
    assert_like_torch(DataLoader(range(3), sampler=SequentialSampler(range(3))))


def test_looking_ahead_counts_what_follows():
    assert list(looked_ahead("abcd", 2)) == [("a", 2), ("b", 2), ("c", 1), ("d", 0)]
    assert list(looked_ahead("abcd", 2, 4)) == [("a", 3), ("b", 2), ("c", 1), ("d", 0)]
    assert list(looked_ahead("", 2)) == []
