"""Sharing out iterable datasets: the samples of one process, and the streams of ranks with workers."""

from __future__ import annotations

import copy
import itertools
import math
import pickle

import pytest
import torch
from torch.utils.data import ChainDataset, DataLoader, IterableDataset, get_worker_info

from accel_core import Rows, Shard
from accel_data.iterable import IterableDatasetShard
from accel_data.worker_streams import CountedCollate, ShardedStream, WorkerStart

TABLE = """
False False 12 2 014589 2367ab
False False 11 2 014589 2367a0
False False 9 2 014580 236712
False False 3 2 01 20
False False 1 2 00 00
False False 10 4 01238901 45672345
False False 2 4 0101 0101
False True 12 2 014589 2367ab
False True 11 2 0145 2367
False True 9 2 0145 2367
False True 3 2 - -
False True 1 2 - -
False True 10 4 0123 4567
False True 2 4 - -
True False 12 2 02468a 13579b
True False 11 2 02468a 135790
True False 9 2 02468 13570
True False 3 2 02 10
True False 1 2 0 0
True False 10 4 014589 236701
True False 2 4 01 01
True True 12 2 02468a 13579b
True True 11 2 02468 13579
True True 9 2 0246 1357
True True 3 2 0 1
True True 1 2 - -
True True 10 4 0145 2367
True True 2 4 - -
False False 8 4 0123 4567
True False 8 4 0145 2367
"""


class Stream(IterableDataset):
    """The numbers below `length`, the same for every worker; with an epoch."""

    def __init__(self, length, epoch=0):
        self.length = length
        self.epoch = epoch

    def __iter__(self):
        return (100 * self.epoch + i for i in range(self.length))

    def set_epoch(self, epoch):
        self.epoch = epoch


class Sized(Stream):
    def __len__(self):
        return self.length


class Splitting(Stream):
    """Splits itself among the workers, sample by sample."""

    def __iter__(self):
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        return itertools.islice(super().__iter__(), worker, None, workers)


class SplittingLazily(Stream):
    def __iter__(self):
        for sample in super().__iter__():
            info = get_worker_info()
            if info is None or sample % info.num_workers == info.id:
                yield sample


class Range(IterableDataset):
    """torch's documented pattern: a worker_init_fn sets the bounds."""

    def __init__(self, start, end):
        self.start, self.end = start, end

    def __iter__(self):
        return iter(range(self.start, self.end))


def split_bounds(worker_id):
    info = get_worker_info()
    dataset = info.dataset
    each = math.ceil((dataset.end - dataset.start) / info.num_workers)
    dataset.start += worker_id * each
    dataset.end = min(dataset.end, dataset.start + each)


def draw(worker_id):
    torch.manual_seed(1000 * get_worker_info().num_workers + worker_id)


class WhoAmI(IterableDataset):
    """Yields what the dataset sees of its worker once the first sample is out."""

    def __iter__(self):
        yield "first"
        info = get_worker_info()
        yield f"{info.dataset is self} {isinstance(info, type(info).__mro__[1])} {info.seed > 0}"


class Popped(IterableDataset):
    def __iter__(self):
        return iter([{"id": 0, "label": 1}])


def popping(samples):
    return [sample.pop("label") for sample in samples]


class Restarting(IterableDataset):
    """An iterator of itself: it begins anew with every `iter`, and when it is asked behind its end."""

    def __init__(self, length):
        self.length = length

    def __iter__(self):
        self.left = iter(range(self.length))
        return self

    def __next__(self):
        try:
            return next(self.left)
        except StopIteration:
            self.left = iter(range(self.length))
            raise


class Batches(IterableDataset):
    def __iter__(self):
        return iter([[0, 1], [2], [3, 4]])


def stream_loader(stream, collate_fn=list, worker_init_fn=None, batched=True, **options):
    """A loader as it is prepared over a stream."""
    options["batch_size"] = stream.part if batched else None
    collate, start = CountedCollate(collate_fn), WorkerStart(worker_init_fn)
    return DataLoader(stream, collate_fn=collate, worker_init_fn=start, **options)


def counted(dataset, index=0, count=2, *, part=2, drop_last=False, fill=True, skip=0, **options):
    """What one rank receives."""
    stream = ShardedStream(dataset, Shard(index, count), part, drop_last, fill, skip)
    return list(stream_loader(stream, **options))


def error_of(dataset):
    """What two workers raise; without a traceback that keeps them alive, for torch then waits seconds for their end."""
    try:
        counted(dataset, num_workers=2)
    except RuntimeError as error:
        return str(error)
    return ""


def real_samples(received):
    return [sample for batch, rows, _ in received for sample in batch[: rows.real]]


@pytest.mark.parametrize("row", TABLE.strip().splitlines())
def test_each_process_reads_what_the_table_says(row):
    split, drop_last, length, size, *expected = row.split()
    for index, digits in enumerate(expected):
        shard = IterableDatasetShard(Sized(int(length)), int(size), drop_last == "True", 2, index, split == "True")
        samples = [int(digit, 16) for digit in digits.strip("-")]
        assert list(shard) == samples
        assert len(shard) == len(samples)


@pytest.mark.parametrize("length", range(14))
@pytest.mark.parametrize("count", [1, 2, 3])
def test_every_sample_is_real_once(length, count):
    shards = [IterableDatasetShard(Sized(length), 2, num_processes=count, process_index=i) for i in range(count)]
    rows = [list(shard.rows()) for shard in shards]
    assert sorted(sample for part in rows for sample, is_real in part if is_real) == list(range(length))
    assert [len(part) for part in rows] == [len(shard) for shard in shards]
    assert len({len(part) for part in rows}) == 1


def test_a_single_process_gets_what_the_dataset_yields():
    assert list(IterableDatasetShard(Stream(5), 2)) == [0, 1, 2, 3, 4]
    assert list(IterableDatasetShard(Stream(5), 2, drop_last=True)) == [0, 1, 2, 3]


def test_an_iterator_that_begins_anew_when_asked_again_is_read_once():
    for length, drop_last, expected in ((3, False, [2, 0]), (3, True, []), (9, False, [2, 3, 6, 7, 1, 2])):
        shard = IterableDatasetShard(Restarting(length), 2, drop_last, 2, 1)
        assert list(itertools.islice(shard, 10)) == expected


def test_the_epoch_is_passed_on_where_it_is_taken():
    dataset = Stream(2)
    IterableDatasetShard(dataset).set_epoch(3)
    IterableDatasetShard(range(2)).set_epoch(3)
    assert dataset.epoch == 3


def test_a_shard_of_no_process_or_of_uneven_pieces_is_refused():
    with pytest.raises(ValueError, match=r"IterableDatasetShard\(num_processes=2, process_index=2\) names no process"):
        IterableDatasetShard(range(4), num_processes=2, process_index=2)
    with pytest.raises(
        ValueError, match=r"batch_size=7 is not a multiple of 3. Use batch_size=9, or split_batches=False"
    ):
        IterableDatasetShard(range(4), 7, num_processes=3, split_batches=True)
    with pytest.raises(ValueError, match="Use batch_size=4, or split"):
        IterableDatasetShard(range(4), 1, num_processes=4, split_batches=True)
    with pytest.raises(ValueError, match=r"batch_size=0\) would hand out nothing"):
        IterableDatasetShard(range(4), 0)


def test_a_stream_without_a_length_has_a_shard_without_one():
    with pytest.raises(TypeError, match="number of samples was asked for, but Stream has no length"):
        len(IterableDatasetShard(Stream(4)))
    with pytest.raises(TypeError, match="Stream has no length. Give it a __len__"):
        len(ShardedStream(Stream(4), Shard(0, 2), 2, False, True))


@pytest.mark.parametrize(("dataset", "init", "lanes"), [
    (Stream(11), draw, 1),
    (Restarting(11), None, 1),
    (Splitting(11), None, 2),
    (SplittingLazily(11), None, 2),
    (Range(0, 11), split_bounds, 2),
])  # fmt: skip
def test_workers_and_ranks_read_every_sample_once(dataset, init, lanes):
    ranks = [counted(dataset, index, num_workers=2, worker_init_fn=init) for index in range(2)]
    assert sorted(sample for received in ranks for sample in real_samples(received)) == list(range(11))
    assert {mark.lanes for received in ranks for _, _, mark in received} == {lanes}
    assert {rows.rows for received in ranks for _, rows, _ in received} == {2}
    assert len(ranks[0]) == len(ranks[1])


@pytest.mark.parametrize(
    ("dataset", "whole_steps"), [(Stream(11), [[0, 1], [4, 5]]), (Splitting(11), [[0, 2], [1, 3]])]
)
def test_workers_leave_out_an_incomplete_end_or_leave_it_as_it_is(dataset, whole_steps):
    """A dataset that splits itself has the samples 8, 10 and 9 left in its two lanes."""
    dropped = counted(dataset, drop_last=True, num_workers=2)
    assert [batch for batch, _, _ in dropped] == whole_steps
    left = [counted(dataset, index, fill=False, num_workers=2) for index in range(2)]
    assert sorted(sample for received in left for sample in real_samples(received)) == list(range(11))
    assert all(rows == Rows(len(batch), len(batch)) for received in left for batch, rows, _ in received)


def test_workers_that_take_turns_keep_the_order_of_the_stream():
    alone, together = counted(Stream(23), 1, 2), counted(Stream(23), 1, 2, num_workers=2)
    assert together == alone
    assert [batch for batch, _, _ in alone] == [[2, 3], [6, 7], [10, 11], [14, 15], [18, 19], [22, 0]]
    assert [mark.read for _, _, mark in alone] == [4, 8, 12, 16, 20, 23]


def test_padding_is_counted_and_an_incomplete_end_can_be_left():
    filled = [counted(Stream(5), index) for index in range(2)]
    assert [[rows for _, rows, _ in received] for received in filled] == [
        [Rows(2, 2), Rows(2, 1)],
        [Rows(2, 2), Rows(2, 0)],
    ]
    left = [counted(Stream(5), index, fill=False) for index in range(2)]
    assert [[batch for batch, _, _ in received] for received in left] == [[[0, 1], [4]], [[2, 3]]]
    assert counted(Stream(0)) == counted(Stream(0), num_workers=2) == []


def test_lanes_that_end_unevenly_are_filled_each_by_itself():
    """Worker 0 has the samples 0 to 5, worker 1 has 6 to 8."""
    ranks = [counted(Range(0, 9), i, part=1, num_workers=2, worker_init_fn=split_bounds) for i in range(2)]
    assert [batch for batch, _, _ in ranks[0]] == [[0], [5], [2], [7], [4]]
    assert [(batch, rows.real) for batch, rows, _ in ranks[1]] == [([1], 1), ([6], 1), ([3], 1), ([8], 1), ([0], 0)]
    assert [mark[1:3] for _, _, mark in ranks[0]] == [(0, 2), (1, 2), (0, 4), (1, 4), (0, 5)]


@pytest.mark.parametrize("workers", [0, 2])
def test_skipped_samples_are_left_out_and_still_fill_up(workers):
    whole, behind = (counted(Stream(13), 1, skip=skip, num_workers=workers) for skip in (0, 8))
    assert [received[:2] for received in behind] == [received[:2] for received in whole[2:]]
    assert {mark.skipped for _, _, mark in behind} == {8}
    assert behind[-1].mark.read == 13


def test_a_dataset_that_splits_itself_skips_nothing():
    assert counted(Splitting(8), skip=4, num_workers=2)[0][::2] == ([0, 2], (2, 0, 4, 0))
    assert counted(Splitting(8), skip=4, num_workers=1)[0][::2] == ([4, 5], (1, 0, 8, 4))


def test_a_position_behind_the_end_is_an_error():
    with pytest.raises(ValueError, match="behind 8 samples was loaded, but the dataset yields only 5"):
        counted(Stream(5), skip=8)


def test_asking_for_the_workers_too_late_is_an_error():
    dataset = ChainDataset([Range(0, 4), Splitting(8)])
    assert real_samples(counted(dataset, num_workers=1)) == real_samples(counted(dataset))
    assert "ChainDataset asked get_worker_info() for num_workers only behind its first sample" in error_of(dataset)


def test_without_batches_whole_elements_are_shared_out():
    ranks = [counted(Batches(), i, part=1, batched=False) for i in range(2)]
    assert [received[:2] for received in ranks[0]] == [([0, 1], None), ([3, 4], None)]
    assert [received[:2] for received in ranks[1]] == [([2], None), ([0, 1], Rows(None, 0))]


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_running_workers_learn_of_the_epoch_and_of_the_next_beginning(context):
    stream = ShardedStream(Stream(6), Shard(0, 2), 1, False, True)
    loader = stream_loader(stream, num_workers=1, persistent_workers=True, multiprocessing_context=context)
    read = []
    for epoch, skip in ((4, 2), (5, 0), (6, 4)):
        stream.set_epoch(epoch)
        stream.begin(skip=skip)
        read.append([batch[0] for batch, _, _ in loader])
    assert read == [[402, 404], [500, 502, 504], [604]]


def test_a_dataset_that_goes_on_by_itself_counts_from_there():
    stream = ShardedStream(Range(4, 9), Shard(0, 2), 2, False, False)
    stream.begin(read=4, fill=False)
    assert [mark.read for _, _, mark in stream_loader(stream)] == [8, 9]


def test_the_users_dataset_is_seen_and_not_changed():
    dataset = Sized(7)
    before = dict(vars(dataset))
    stream = ShardedStream(dataset, Shard(1, 2), 2, False, True)
    assert stream.length == 7
    assert [len(ShardedStream(dataset, Shard(i, 2), 2, False, False)) for i in range(2)] == [4, 3]
    for twin in (stream, copy.deepcopy(stream), pickle.loads(pickle.dumps(stream))):
        assert [batch for batch, _, _ in stream_loader(twin)] == [[2, 3], [6, 0]]
    assert vars(dataset) == before
    with pytest.raises(AttributeError, match="no_such"):
        stream.no_such


def test_the_dataset_of_a_worker_is_the_users():
    received = counted(WhoAmI(), 0, 1, part=2, num_workers=1)
    assert received[0].batch == ["first", "True True True"]


def test_collate_functions_may_take_their_samples_apart():
    assert [counted(Popped(), i, part=1, collate_fn=popping)[0][:2] for i in range(2)] == [
        ([1], Rows(1, 1)),
        ([1], Rows(1, 0)),
    ]
