"""Leaving out the first batches: what is read, what metrics see, and what comes after."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from accel_core import Accelerator, Feed, Shard
from accel_core.api.loader import prepare_local_loader
from accel_data import DataLoaderDispatcher, DataLoaderShard, Sharded, skip_first_batches
from accel_testing.ranks import run_ranks

pytestmark = pytest.mark.timeout(120)


class Counting(Dataset):
    """Remembers what was read."""

    def __init__(self, n):
        self.n = n
        self.read = []

    def __len__(self):
        return self.n

    def __getitem__(self, index):
        self.read.append(index)
        return index


class Stream(IterableDataset):
    def __init__(self, n):
        self.n = n

    def __iter__(self):
        return iter(range(self.n))

    def __len__(self):
        return self.n


class Triples:
    """A batch sampler of the user's own."""

    def __init__(self, n):
        self.n = n

    def __iter__(self):
        return (list(range(i, min(i + 3, self.n))) for i in range(0, self.n, 3))

    def __len__(self):
        return (self.n + 2) // 3


def sharded(loader, rank, ranks, feed=None, **options):
    return Sharded(**options).prepare_loader(loader, Shard(rank, ranks), feed or Feed(), None, 5)


def ids(loader):
    return [batch.tolist() for batch in loader]


def real(loader, feed):
    """The samples of each batch, without padding."""
    return [batch.tolist()[: rows.real] if (rows := feed.current_rows()) else batch.tolist() for batch in loader]


LOADERS = {
    "in order": lambda dataset: DataLoader(dataset, batch_size=3),
    "shuffled": lambda dataset: DataLoader(dataset, batch_size=3, shuffle=True),
    "own batch sampler": lambda dataset: DataLoader(dataset, batch_sampler=Triples(len(dataset))),
    "generator": lambda dataset: DataLoader(dataset, 3, shuffle=True, generator=torch.Generator().manual_seed(3)),
}


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("number", [0, 1, 3, 4, 9])
@pytest.mark.parametrize("kind", LOADERS)
def test_a_sharded_loader_reads_nothing_that_is_left_out(kind, number, rank):
    """Padding is still known, and the next epoch is whole. Twenty samples make four batches of two ranks."""
    feed, dataset = Feed(), Counting(20)
    loader = sharded(LOADERS[kind](dataset), rank, 2, feed)
    whole_feed, whole_dataset = Feed(), Counting(20)
    whole = sharded(LOADERS[kind](whole_dataset), rank, 2, whole_feed)
    expected, reads = real(whole, whole_feed), list(whole_dataset.read)
    following = real(whole, whole_feed)
    skipped = skip_first_batches(loader, number)
    assert len(skipped) == max(4 - number, 0)
    assert real(skipped, feed) == expected[number:]
    assert dataset.read == reads[3 * number :]
    assert loader.state_dict()["epoch"] == 1
    assert real(loader, feed) == following
    assert len(loader) == 4


def test_skipping_twice_leaves_out_the_sum():
    loader = sharded(DataLoader(range(20), batch_size=2), 0, 1)
    assert ids(skip_first_batches(skip_first_batches(loader, 2), 3)) == ids(loader)[5:]


def test_a_position_counts_what_was_left_out():
    loader = sharded(DataLoader(range(20), batch_size=2), 1, 2)
    next(iter(skip_first_batches(loader, 2)))
    state = loader.state_dict()
    assert (state["epoch"], state["samples"]) == (0, 12)
    resumed = sharded(DataLoader(range(20), batch_size=2), 0, 1)
    resumed.load_state_dict(state)
    assert ids(resumed) == [[12, 13], [14, 15], [16, 17], [18, 19]]


@pytest.mark.parametrize("make", [
    lambda: DataLoader(range(8), batch_size=3),
    lambda: DataLoader(Stream(8), batch_size=3),
    lambda: DataLoader(range(8), batch_sampler=Triples(8)),
    lambda: DataLoader(range(8), batch_size=3, num_workers=1),
    lambda: prepare_local_loader(DataLoader(range(8), batch_size=3), Feed(), None),
    lambda: prepare_local_loader(DataLoader(Stream(8), batch_size=3), Feed(), None),
])  # fmt: skip
@pytest.mark.parametrize("number", [0, 1, 3, 7])
def test_any_loader_can_be_skipped(make, number):
    """Also one that is not prepared, or that the core prepared."""
    loader = make()
    skipped = skip_first_batches(loader, number)
    for _ in range(2):
        assert ids(skipped) == [[0, 1, 2], [3, 4, 5], [6, 7]][number:]
    assert ids(loader) == [[0, 1, 2], [3, 4, 5], [6, 7]]


def test_a_plain_loader_that_is_skipped_keeps_its_class_and_has_a_position():
    class Mine(DataLoader):
        pass

    skipped = skip_first_batches(Mine(range(8), batch_size=3), 1)
    assert isinstance(skipped, Mine)
    assert isinstance(skipped, DataLoaderShard)
    next(iter(skipped))
    assert skipped.state_dict()["samples"] == 6


@pytest.mark.parametrize("number", [-1, 1.0, True, "2", None])
@pytest.mark.parametrize("make", [
    lambda: DataLoader(range(8)),
    lambda: prepare_local_loader(DataLoader(range(8)), Feed(), None),
    lambda: sharded(DataLoader(range(8)), 0, 2),
    lambda: DataLoaderDispatcher(range(8)),
])  # fmt: skip
def test_only_a_number_of_batches_can_be_left_out(make, number):
    with pytest.raises(ValueError, match=r"expected how many batches are left out, >= 0"):
        skip_first_batches(make(), number)


def test_what_is_no_loader_cannot_be_skipped():
    with pytest.raises(TypeError, match=r"given a list, expected a torch\.utils\.data\.DataLoader.*islice\(batches, 2"):
        skip_first_batches([1, 2, 3], 2)


def test_an_accelerator_skips_prepared_loaders_only():
    accelerator = Accelerator(cpu=True)
    loader = DataLoader(range(8), batch_size=3)
    with pytest.raises(TypeError, match="was given a DataLoader that cannot leave out batches. Pass what prepare"):
        accelerator.skip_first_batches(loader, 1)
    prepared = accelerator.prepare(loader)
    assert ids(accelerator.skip_first_batches(prepared, 1)) == [[3, 4, 5], [6, 7]]
    with pytest.raises(ValueError, match="expected how many batches are left out, >= 0"):
        accelerator.skip_first_batches(prepared, -1)


@pytest.mark.parametrize("batches", [0, 1, 4])
def test_skipped_batches_are_no_part_of_a_window(batches):
    """Windows of accumulation end with the epoch."""
    feed = Feed(3)
    loader = sharded(DataLoader(range(10), batch_size=2), 0, 1, feed)
    following = [feed.begin_step() for _ in skip_first_batches(loader, batches)]
    assert following == list(reversed(range(5 - batches)))


KINDS = {
    "map": lambda: DataLoader(range(23), batch_size=3),
    "shuffled": lambda: DataLoader(range(23), batch_size=3, shuffle=True),
    "stream": lambda: DataLoader(Stream(23), batch_size=3),
    "batch sampler": lambda: DataLoader(range(23), batch_sampler=Triples(23)),
}


def skipped_on_ranks(dispatch, kinds):
    """For each kind and number: the rest of an epoch as metrics see it, the next epoch, lengths, and the state inside."""
    accelerator = Accelerator(cpu=True, dispatch_batches=dispatch)
    found = {}
    for kind in kinds:
        for number in (0, 1, 3, 4, 7):
            loader = accelerator.prepare(KINDS[kind]())
            skipped = accelerator.skip_first_batches(loader, number)
            rest, states = [], []
            for batch in skipped:
                rest.append(accelerator.gather_for_metrics(batch).tolist())
                states.append(skipped.state_dict()["samples"])
            lengths = len(skipped), len(loader)
            following = [accelerator.gather_for_metrics(batch).tolist() for batch in loader]
            found[kind, number] = rest, states, lengths, following
    return found


@pytest.mark.parametrize(("dispatch", "kinds"), [(True, [*KINDS]), (False, ["map", "shuffled", "batch sampler"])])
def test_metrics_stay_exact_behind_skipped_batches(dispatch, kinds):
    """On two ranks, with a ragged end: four steps of six samples."""
    found, there = run_ranks(skipped_on_ranks, 2, dispatch, kinds)
    assert found == there
    for (kind, number), (rest, states, lengths, following) in found.items():
        samples = list(itertools.chain(*rest))
        if kind != "shuffled":
            assert samples == list(range(6 * number, 23)), kind
            assert list(itertools.chain(*following)) == list(range(23)), kind
        assert len(set(samples)) == len(samples) == max(23 - 6 * number, 0)
        assert sorted(itertools.chain(*following)) == list(range(23))
        assert lengths == (max(4 - number, 0), 4)
        assert [min(state, 23) for state in states] == [min(6 * step, 23) for step in range(number + 1, 5)]
