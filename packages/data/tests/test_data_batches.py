"""What each process reads: the index tables, and the promise that nothing is lost or counted twice."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler

from accel_core import Feed, Shard
from accel_data import BatchSamplerShard, Sharded

# split_batches, even_batches, drop_last, samples, batch size, what rank 0 reads, what rank 1 reads.
# Hexadecimal digits are indices, brackets are batches, - is nothing.
TABLE = """
F T F 12 2 [01][45][89] [23][67][ab]
F T F 11 2 [01][45][89] [23][67][a0]
F T F 10 2 [01][45][89] [23][67][01]
F T F 9 2 [01][45][80] [23][67][12]
F T F 3 2 [01] [20]
F T F 2 2 [01] [01]
F T F 1 2 [00] [00]
F T F 10 4 [0123][8901] [4567][2345]
F T F 9 4 [0123][8012] [4567][3456]
F T F 2 4 [0101] [0101]
F T T 12 2 [01][45][89] [23][67][ab]
F T T 11 2 [01][45] [23][67]
F T T 10 2 [01][45] [23][67]
F T T 9 2 [01][45] [23][67]
F T T 3 2 - -
F T T 2 2 - -
F T T 1 2 - -
F T T 10 4 [0123] [4567]
F T T 9 4 [0123] [4567]
F T T 2 4 - -
F F F 12 2 [01][45][89] [23][67][ab]
F F F 11 2 [01][45][89] [23][67][a]
F F F 10 2 [01][45][89] [23][67]
F F F 9 2 [01][45][8] [23][67]
F F F 3 2 [01] [2]
F F F 2 2 [01] -
F F F 1 2 [0] -
F F F 10 4 [0123][89] [4567]
F F F 9 4 [0123][8] [4567]
F F F 2 4 [01] -
F F T 12 2 [01][45][89] [23][67][ab]
F F T 11 2 [01][45] [23][67]
F F T 10 2 [01][45] [23][67]
F F T 9 2 [01][45] [23][67]
F F T 3 2 - -
F F T 2 2 - -
F F T 1 2 - -
F F T 10 4 [0123] [4567]
F F T 9 4 [0123] [4567]
F F T 2 4 - -
T T F 12 2 [0][2][4][6][8][a] [1][3][5][7][9][b]
T T F 11 2 [0][2][4][6][8][a] [1][3][5][7][9][0]
T T F 10 2 [0][2][4][6][8] [1][3][5][7][9]
T T F 9 2 [0][2][4][6][8] [1][3][5][7][0]
T T F 3 2 [0][2] [1][0]
T T F 2 2 [0] [1]
T T F 1 2 [0] [0]
T T F 10 4 [01][45][89] [23][67][01]
T T F 9 4 [01][45][80] [23][67][12]
T T F 2 4 [01] [01]
T T T 12 2 [0][2][4][6][8][a] [1][3][5][7][9][b]
T T T 11 2 [0][2][4][6][8] [1][3][5][7][9]
T T T 10 2 [0][2][4][6][8] [1][3][5][7][9]
T T T 9 2 [0][2][4][6] [1][3][5][7]
T T T 3 2 [0] [1]
T T T 2 2 [0] [1]
T T T 1 2 - -
T T T 10 4 [01][45] [23][67]
T T T 9 4 [01][45] [23][67]
T T T 2 4 - -
T F F 12 2 [0][2][4][6][8][a] [1][3][5][7][9][b]
T F F 11 2 [0][2][4][6][8][a] [1][3][5][7][9]
T F F 10 2 [0][2][4][6][8] [1][3][5][7][9]
T F F 9 2 [0][2][4][6][8] [1][3][5][7]
T F F 3 2 [0][2] [1]
T F F 2 2 [0] [1]
T F F 1 2 [0] -
T F F 10 4 [01][45][89] [23][67]
T F F 9 4 [01][45][8] [23][67]
T F F 2 4 [01] -
T F T 12 2 [0][2][4][6][8][a] [1][3][5][7][9][b]
T F T 11 2 [0][2][4][6][8] [1][3][5][7][9]
T F T 10 2 [0][2][4][6][8] [1][3][5][7][9]
T F T 9 2 [0][2][4][6] [1][3][5][7]
T F T 3 2 [0] [1]
T F T 2 2 [0] [1]
T F T 1 2 - -
T F T 10 4 [01][45] [23][67]
T F T 9 4 [01][45] [23][67]
T F T 2 4 - -
"""


class Batches:
    """A batch sampler of the user's own."""

    def __init__(self, batches, **attributes):
        self.batches = batches
        vars(self).update(attributes)

    def __iter__(self):
        return iter(self.batches)

    def __len__(self):
        return len(self.batches)


def rows_of_table():
    for line in TABLE.split("\n"):
        if line.strip():
            split, even, drop, n, b, *ranks = line.split()
            yield split == "T", even == "T", drop == "T", int(n), int(b), [parsed(rank) for rank in ranks]


def parsed(text):
    return [] if text == "-" else [[int(digit, 16) for digit in part] for part in text.strip("[]").split("][")]


def batches_of_loader(n, b, drop_last, shard, split=False, even=True, seed=0, **options):
    """The batches of one prepared loader with, for each, how many rows are real and how many batches remain."""
    loader = DataLoader(range(n), batch_size=b, drop_last=drop_last, **options)
    feed = Feed()
    prepared = Sharded(split, even).prepare_loader(loader, shard, feed, None, seed)
    found = [(batch.tolist(), feed.current_rows(), feed.begin_step()) for batch in prepared]
    assert len(prepared) == len(found)
    assert all(rows.rows == len(ids) for ids, rows, _ in found)
    assert [remaining for _, _, remaining in found] == list(reversed(range(len(found))))
    return [(ids, rows.real) for ids, rows, _ in found]


@pytest.mark.parametrize(("split", "even", "drop_last", "n", "b", "expected"), list(rows_of_table()))
def test_each_row_of_the_index_table_holds_for_batch_samplers_and_loaders(split, even, drop_last, n, b, expected):
    """The exact tables; the length is the number of iterations."""
    sampler = BatchSampler(SequentialSampler(range(n)), b, drop_last)
    custom = Batches(list(sampler), batch_size=b, drop_last=drop_last)
    for rank in (0, 1):
        for batch_sampler in (sampler, custom):
            shard = BatchSamplerShard(batch_sampler, 2, rank, split, even)
            assert list(shard) == expected[rank]
        assert len(BatchSamplerShard(sampler, 2, rank, split, even)) == len(expected[rank])
        found = batches_of_loader(n, b, drop_last, Shard(rank, 2), split, even)
        assert [ids for ids, _ in found] == expected[rank]


def test_the_documented_example_holds():
    batches = BatchSampler(SequentialSampler(range(8)), 4, drop_last=False)
    assert list(BatchSamplerShard(batches, 2, 0)) == [[0, 1, 2, 3]]
    assert list(BatchSamplerShard(batches, 2, 1)) == [[4, 5, 6, 7]]
    assert list(BatchSamplerShard(batches, 2, 0, split_batches=True)) == [[0, 1], [4, 5]]
    assert list(BatchSamplerShard(batches, 2, 1, split_batches=True)) == [[2, 3], [6, 7]]


def one_process_order(n, drop_last, step):
    return list(range(n - n % step if drop_last else n))


def check_exactly_once(n, b, ranks, drop_last, even, split, *, custom):
    """The real rows of each global step, rank after rank, are the one-process order."""
    if split and b % ranks:
        return
    step = b if split else b * ranks
    sampler = BatchSampler(SequentialSampler(range(n)), b, drop_last)
    if custom:
        sampler = Batches(list(sampler), batch_size=b, drop_last=drop_last)
    by_rank = [list(BatchSamplerShard(sampler, ranks, r, split, even).rows()) for r in range(ranks)]
    lengths = [len(BatchSamplerShard(sampler, ranks, r, split, even)) for r in range(ranks)]
    if not (custom and split and not even):  # there the length is an upper bound
        assert lengths == [len(batches) for batches in by_rank]
    if not custom:
        for rank in range(ranks):
            found = batches_of_loader(n, b, drop_last, Shard(rank, ranks), split, even)
            assert found == [(indices, rows.real) for indices, rows, _ in by_rank[rank]]
    order = []
    for parts in itertools.zip_longest(*by_rank, fillvalue=([], None, 0)):
        for indices, rows, _ in parts:
            order += indices[: rows.real] if rows else []
    assert order == one_process_order(n, drop_last, step)
    if even and ranks > 1:
        assert len({len(batches) for batches in by_rank}) == 1
        assert {len(indices) for batches in by_rank for indices, _, _ in batches} <= {b // ranks if split else b}


CASES = list(itertools.product(range(1, 41), range(1, 9), range(1, 5), *[(False, True)] * 4))


def test_every_sample_is_read_exactly_once_and_in_order():
    """`n` in 1..40 x batch 1..8 x ranks 1..4 x drop_last x even x split x own batch sampler; sampled, whole in soak."""
    for n, b, ranks, drop_last, even, split, custom in random.Random(0).sample(CASES, 1000):
        check_exactly_once(n, b, ranks, drop_last, even, split, custom=custom)


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_every_sample_is_read_exactly_once_and_in_order_in_all_cases(ranks):
    """The whole product."""
    for n, b, r, drop_last, even, split, custom in CASES:
        if r == ranks:
            check_exactly_once(n, b, r, drop_last, even, split, custom=custom)


VARYING = [[0, 1, 2], [3, 4], [5, 6, 7, 8], [9], [10, 11]]


@pytest.mark.parametrize("attributes", [{}, {"batch_size": None}, {"batch_size": 2}, {"batch_size": 3}])
def test_batches_of_varying_sizes_are_handed_out_as_they_come(attributes):
    """Index tables, batch samplers without a fixed size; semantics 20: nothing is lost, whole first batches fill."""
    sampler = Batches(VARYING, **attributes)
    first, second = (list(BatchSamplerShard(sampler, 2, rank).rows()) for rank in (0, 1))
    assert [indices for indices, _, _ in first] == [[0, 1, 2], [5, 6, 7, 8], [10, 11]]
    assert [indices for indices, _, _ in second] == [[3, 4], [9], [0, 1, 2]]
    assert [(rows.real, read) for _, rows, read in second] == [(2, 5), (1, 10), (0, 12)]
    assert list(BatchSamplerShard(sampler, 2, 1, even_batches=False)) == [[3, 4], [9]]


def test_few_batches_of_varying_sizes_fill_all_ranks():
    by_rank = [list(BatchSamplerShard(Batches([[0, 1, 2], [3]]), 5, rank).rows()) for rank in range(5)]
    assert [(indices, rows.real) for [(indices, rows, _)] in by_rank] == [
        ([0, 1, 2], 3),
        ([3], 1),
        ([0, 1, 2], 0),
        ([3], 0),
        ([0, 1, 2], 0),
    ]


def test_a_batch_sampler_that_fills_one_list_again_and_again_is_read_right():
    def refilled():
        batch = []
        for start in range(0, 8, 2):
            batch[:] = [start, start + 1]
            yield batch

    assert list(BatchSamplerShard(refilled(), 2, 0)) == [[0, 1], [4, 5]]


def test_one_process_gets_what_the_batch_sampler_yields():
    batches = BatchSampler(SequentialSampler(range(5)), 2, drop_last=False)
    assert list(BatchSamplerShard(batches)) == list(batches)
    assert len(BatchSamplerShard(batches)) == 3


@pytest.mark.parametrize("attributes", [{}, {"batch_size": None}])
def test_splitting_batches_without_a_size_is_refused(attributes):
    with pytest.raises(ValueError, match="Batches has no batch_size, so its batches may vary. Use split_batches=False"):
        BatchSamplerShard(Batches(VARYING, **attributes), 2, 0, split_batches=True)


def test_splitting_batches_that_cannot_be_divided_is_refused():
    batches = BatchSampler(SequentialSampler(range(9)), 3, drop_last=False)
    with pytest.raises(
        ValueError, match="batch_size=3 is not a multiple of 2. Use batch_size=4, or split_batches=False"
    ):
        BatchSamplerShard(batches, 2, 0, split_batches=True)


@pytest.mark.parametrize("batches", [[[0, 1], [2], [3, 4]], [[0, 1], [2, 3, 4]]])
def test_splitting_batches_that_vary_against_their_word_is_refused(batches):
    with pytest.raises(ValueError, match="says batch_size=2 and yielded a batch of .*Use split_batches=False"):
        list(BatchSamplerShard(Batches(batches, batch_size=2), 2, 0, split_batches=True))


@pytest.mark.parametrize(("processes", "index"), [(0, 0), (2, 2), (2, -1)])
def test_a_process_that_does_not_exist_is_refused(processes, index):
    with pytest.raises(ValueError, match="names no process: process_index must be at least 0 and below num_processes"):
        BatchSamplerShard([], processes, index)


def test_the_length_of_a_batch_sampler_without_one_is_refused():
    with pytest.raises(TypeError, match="generator has no length. Give it a __len__"):
        len(BatchSamplerShard((batch for batch in VARYING), 2, 0))


def test_the_epoch_is_passed_on():
    told = []
    inner = Batches([])
    inner.set_epoch = told.append
    BatchSamplerShard(Batches([], sampler=inner, set_epoch=told.append)).set_epoch(3)
    assert told == [3, 3]


def test_many_samples_are_read_block_by_block():
    """More positions than are computed at once, under a shuffled order: ranks together read the one-process order."""
    n, b, ranks = 20_011, 7, 3
    options = {"shuffle": True, "seed": 5}
    [whole, *parts] = [
        batches_of_loader(n, b * step, False, shard, **options)
        for step, shard in [(ranks, Shard(0, 1)), *((1, Shard(r, ranks)) for r in range(ranks))]
    ]
    order = [i for step in zip(*parts, strict=True) for ids, real in step for i in ids[:real]]
    assert order == [i for ids, _ in whole for i in ids]
    assert sorted(order) == list(range(n))


def test_a_batch_larger_than_a_block_is_read_whole():
    found = batches_of_loader(10_000, 6000, False, Shard(1, 2))
    assert found == [([*range(6000, 10_000), *range(2000)], 4000)]


def test_shards_of_an_empty_set_are_empty():
    shard = BatchSamplerShard(BatchSampler(SequentialSampler([]), 2, drop_last=False), 2, 0)
    assert (list(shard), len(shard)) == ([], 0)
    assert batches_of_loader(0, 2, False, Shard(0, 2)) == []


def test_samples_of_a_users_sampler_are_shared_out_like_any_other():
    sampler = RandomSampler(range(11), generator=torch.Generator().manual_seed(1))
    order = list(RandomSampler(range(11), generator=torch.Generator().manual_seed(1)))
    found = batches_of_loader(11, 2, False, Shard(1, 2), sampler=sampler)
    assert found == [(order[2:4], 2), (order[6:8], 2), ([order[10], order[0]], 1)]
