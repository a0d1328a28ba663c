"""Which samples a batch was made of: told for every kind of loader, or said to be unknown."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler, get_worker_info

from accel_core import Feed, Rows, Shard
from accel_core.api.loader import Positions
from accel_data import DataLoaderConfiguration, Sharded
from accel_diagnostics import SampleIds, sample_ids
from accel_testing import run_ranks

N = 11


class Stream(IterableDataset):
    def __init__(self, length=N):
        self.length = length

    def __iter__(self):
        return iter(range(self.length))


class Split(Stream):
    """Splits itself over the workers."""

    def __iter__(self):
        info = get_worker_info()
        return iter(range(self.length)) if info is None else iter(range(info.id, self.length, info.num_workers))


class Uneven:
    """Batches of one, two, three, … samples."""

    def __iter__(self):
        return iter([[0], [1, 2], [3, 4, 5], [6, 7, 8, 9]])

    def __len__(self):
        return 4


def prepare(loader, rank=0, ranks=1, *, feed, **options):
    return Sharded(**{"dispatch_batches": False, **options}).prepare_loader(
        loader, Shard(rank, ranks), feed, None, 2**40
    )


def told(loader, feed):
    """Of each batch its content, and what the feed says of its samples."""
    return [(batch.tolist(), *(sample_ids(*drawn) for drawn in feed.current_drawn())) for batch in loader]


def assert_told(loader, feed, kind):
    """Samples are the numbers of their own places, so that ids must equal contents; padding is marked."""
    batches = told(loader, feed)
    assert batches
    for batch, ids in batches:
        assert ids.kind == kind
        assert len(ids.ids) == len(batch)
        assert list(ids.ids[: ids.real]) == batch[: ids.real]
        assert all(each in (None, value) for each, value in zip(ids.ids[ids.real :], batch[ids.real :], strict=True))
    return batches


LOADERS = [{"batch_size": 4}, {"batch_size": 4, "shuffle": True}, {"batch_sampler": Uneven()}]
OPTIONS = [{}, {"split_batches": True}, {"even_batches": False}, {"use_seedable_sampler": True}]
CUT = [
    (loader, options) for loader in LOADERS for options in OPTIONS if "batch_size" in loader or options != OPTIONS[1]
]


@pytest.mark.parametrize(("loader", "options"), CUT)
def test_indices_of_a_dataset(loader, options):
    for rank in range(2):
        feed = Feed()
        made = DataLoader(torch.arange(N), **loader)
        assert_told(prepare(made, rank, 2, feed=feed, **options), feed, "index")


def test_padding_is_marked():
    feed = Feed()
    loader = prepare(DataLoader(torch.arange(5), batch_size=2), 1, 2, feed=feed)
    assert told(loader, feed)[-1] == ([1, 2], SampleIds((1, 2), "index", 0))
    assert SampleIds((4, 0), "index", 1).describe() == "index 4, 0 (fills up)"
    assert SampleIds((8, None), "position", 1).describe(rows=[1]) == "position (fills up)"
    assert SampleIds(tuple(range(20)), "index", 20).describe(most=2) == "index 0, 1 and 18 more"


def test_workers_that_fetch_ahead_change_nothing():
    feed = Feed()
    loader = DataLoader(torch.arange(N), batch_size=2, shuffle=True, num_workers=2, collate_fn=torch.stack)
    assert_told(prepare(loader, 1, 2, feed=feed), feed, "index")


def test_a_loader_without_batches_and_one_of_another_order():
    feed = Feed()
    lone = DataLoader(torch.arange(3), batch_size=None)
    assert told(prepare(lone, feed=feed), feed) == [(i, SampleIds((i,), "index", 1)) for i in range(3)]
    listed = DataLoader(torch.arange(4), batch_size=None, sampler=BatchSampler(SequentialSampler(range(4)), 2, False))
    assert_told(prepare(listed, feed=feed), feed, "index")


def test_a_batch_outlives_its_iterator_and_nested_loops_tell_both():
    feed = Feed()
    loader = prepare(DataLoader(torch.arange(4), batch_size=2), feed=feed)
    next(iter(loader))
    assert sample_ids(*feed.current_drawn()[0]).ids == (0, 1)
    other = prepare(DataLoader(torch.arange(4), batch_size=1), feed=feed)
    for _, _ in zip(loader, other, strict=False):
        assert len(feed.current_drawn()) == 2
        break


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("skipped", [0, 1])
def test_positions_in_a_stream_that_all_ranks_read(ranks, workers, skipped):
    seen = []
    for rank in range(ranks):
        feed = Feed()
        loader = prepare(DataLoader(Stream(), batch_size=2, num_workers=workers), rank, ranks, feed=feed)
        batches = assert_told(loader.behind(skipped), feed, "position")
        seen += [each for _, ids in batches for each in ids.ids[: ids.real]]
    assert sorted(seen) == list(range(2 * ranks * skipped, N))


def test_positions_of_a_stream_that_one_rank_reads():
    feed = Feed()
    loader = prepare(DataLoader(Stream(), batch_size=2), feed=feed)
    *whole, (_, last) = told(loader, feed)
    assert all(list(ids.ids) == batch and ids.kind == "position" for batch, ids in whole)
    assert last is None  # it may be short, and nobody counts
    assert_told(prepare(DataLoader(Stream(), batch_size=2, drop_last=True), feed=feed), feed, "position")


def test_positions_go_on_behind_a_state():
    feed = Feed()
    first = prepare(DataLoader(Stream(), batch_size=2), 0, 2, feed=feed)
    iterator = iter(first)
    next(iterator)
    state = first.state_dict()
    del iterator
    second = prepare(DataLoader(Stream(), batch_size=2), 1, 2, feed=feed)
    second.load_state_dict(state)
    assert_told(second, feed, "position")


def test_what_is_not_known_is_not_guessed():
    feed = Feed()
    split = prepare(DataLoader(Split(), batch_size=2, num_workers=2), 0, 2, feed=feed)
    own = prepare(DataLoader(Stream(), batch_size=2), 0, 2, feed=feed, presharded=True)
    for loader in (split, own):
        assert {ids for _, ids in told(loader, feed)} == {None}
    assert sample_ids(None, Rows(2, 2)) is None
    assert sample_ids(Positions(4, 1), Rows(2, 1)) == SampleIds((4, None), "position", 1)


def dispatched():
    from accel_core import Accelerator

    found = []
    for dataset, options in ((Stream(10), {}), (torch.arange(10), {}), (torch.arange(10), {"split_batches": True})):
        accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=True, **options))
        loader = accelerator.prepare(DataLoader(dataset, batch_size=2))
        found.append(told(loader, accelerator._feed))
        accelerator.free_memory()
    return found


def test_dispatched_batches_are_numbered_where_all_ranks_have_as_many():
    for found in run_ranks(dispatched, 2):
        for batches in found:
            known = [(batch, ids) for batch, ids in batches if ids is not None]
            assert known
            assert all(ids.kind == "position" and list(ids.ids) == batch for batch, ids in known)
