"""Dispatched loaders on real ranks: who gets what, and what travels."""

from __future__ import annotations

import itertools
import os
import pickle
from collections import namedtuple

import numpy as np
import pytest
import torch
from dispatched_loaders import Items, Measured, Opaque, Sizes, Stream, dispatched, in_order, real, taken
from torch.utils.data import DataLoader, Dataset

from accel_core import Accelerator, Feed, World
from accel_data import DataLoaderDispatcher, slice_tensors
from accel_testing import assert_dies
from accel_testing.ranks import run_ranks

pytestmark = pytest.mark.timeout(120)

TABLE = """
    False False 12 2 [01][45][89] [23][67][ab] [0123][4567][89ab]
    False False 11 2 [01][45][89] [23][67][a0] [0123][4567][89a]
    False False  9 2 [01][45][8] [23][67][0] [0123][4567][8]
    False False  3 2 [01] [20] [012]
    False False  1 2 [0] [0] [0]
    False False 10 4 [0123][8] [4567][9] [01234567][89]
    False False  2 4 [0] [1] [01]
    False True  12 2 [01][45][89] [23][67][ab] [0123][4567][89ab]
    False True  11 2 [01][45] [23][67] [0123][4567]
    False True   9 2 [01][45] [23][67] [0123][4567]
    False True   3 2 - - -
    False True   1 2 - - -
    False True  10 4 [0123] [4567] [01234567]
    False True   2 4 - - -
    True  False 12 2 [0][2][4][6][8][a] [1][3][5][7][9][b] [01][23][45][67][89][ab]
    True  False 11 2 [0][2][4][6][8][a] [1][3][5][7][9][0] [01][23][45][67][89][a]
    True  False  9 2 [0][2][4][6][8] [1][3][5][7][0] [01][23][45][67][8]
    True  False  3 2 [0][2] [1][0] [01][2]
    True  False  1 2 [0] [0] [0]
    True  False 10 4 [01][45][8] [23][67][9] [0123][4567][89]
    True  False  2 4 [0] [1] [01]
    True  True  12 2 [0][2][4][6][8][a] [1][3][5][7][9][b] [01][23][45][67][89][ab]
    True  True  11 2 [0][2][4][6][8] [1][3][5][7][9] [01][23][45][67][89]
    True  True   9 2 [0][2][4][6] [1][3][5][7] [01][23][45][67]
    True  True   3 2 [0] [1] [01]
    True  True   1 2 - - -
    True  True  10 4 [01][45] [23][67] [0123][4567]
    True  True   2 4 - - -
"""
ROWS = [
    (split == "True", drop_last == "True", int(n), int(size), *batches)
    for split, drop_last, n, size, *batches in map(str.split, TABLE.strip().splitlines())
]


class OnFirstRank(Dataset):
    """Must not be read elsewhere."""

    def __init__(self, n):
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, index):
        assert os.environ["RANK"] == "0"
        return index


def shown(batches):
    return "".join(f"[{''.join(f'{i:x}' for i in batch)}]" for batch in batches) or "-"


def rows_of_the_table():
    accelerators = {split: Accelerator(cpu=True, split_batches=split, dispatch_batches=True) for split in (False, True)}
    found = []
    for split, drop_last, n, size, *_ in ROWS:
        accelerator = accelerators[split]
        for dataset in (OnFirstRank(n), Measured(n)):
            loader = accelerator.prepare(DataLoader(dataset, batch_size=size, drop_last=drop_last))
            own, gathered = [], []
            for batch in loader:
                own.append(batch.tolist())
                gathered.append(accelerator.gather_for_metrics(batch).tolist())
            found.append((shown(own), shown(gathered), len(loader) == len(own)))
    return found


def test_ranks_get_what_the_table_says():
    """Map-style and iterable sets alike; the second rank never touches the dataset."""
    first, second = run_ranks(rows_of_the_table, 2)
    for number, (own, gathered, certain) in enumerate(first):
        other, gathered_there, certain_there = second[number]
        _, _, _, _, *expected = row = ROWS[number // 2]
        assert [own, other, gathered] == expected, row
        assert gathered == gathered_there, row
        assert certain, row
        assert certain_there, row


PRODUCT = [
    (n, size, {"drop_last": drop_last}, {"even_batches": even, "split_batches": split})
    for n, size, drop_last, even, split in itertools.product((0, 1, 2, 5, 9, 12, 13, 20), (1, 6), *[(False, True)] * 3)
    if size == 6 or not split
]
VARYING = [(3, 2, 4, 1, 2), (3, 2, 4, 1), (2, 2, 1), (1,), ()]


def loaders_of_the_product():
    """Every case with its options, whether the set is map-style, iterable, or read by a batch sampler of the user's own."""
    for n, size, given, options in PRODUCT:
        for dataset in (range(n), Measured(n)):
            yield DataLoader(dataset, batch_size=size, **given), options
    for sizes in VARYING:
        for even, split, attributes in itertools.product((True, False), (True, False), ({}, {"batch_size": 6})):
            options = {"even_batches": even, "split_batches": split}
            yield DataLoader(range(20), batch_sampler=Sizes(*sizes, **attributes)), options


def passes_of_the_product(ahead):
    found = []
    for loader, options in loaders_of_the_product():
        feed = Feed(ahead)
        prepared = dispatched(loader, feed, **options)
        parts, following, lengths = [], [], []
        for batch in prepared:
            parts.append(real(batch, feed))
            following.append(feed.begin_step())
            lengths.append(len(batch))
        found.append((parts, following, lengths, len(prepared)))
    return found


@pytest.mark.parametrize("ranks", [2, 3])
def test_every_sample_is_yielded_once_in_order(ranks):
    """The number of batches that follow, which decides about windows of accumulation."""
    ahead = 3
    found = run_ranks(passes_of_the_product, ranks, ahead)
    for (loader, options), *by_rank in zip(loaders_of_the_product(), *found, strict=True):
        parts, following, lengths, steps = zip(*by_rank, strict=True)
        expected = [i for batch in loader for i in batch.tolist()]
        if loader.drop_last:
            step = loader.batch_size * (1 if options["split_batches"] else ranks)
            expected = expected[: len(expected) // step * step]
        assert in_order(parts) == expected
        for rank in range(ranks):
            left = list(reversed(range(len(parts[rank]))))
            assert [min(count, ahead) for count in following[rank]] == [min(count, ahead) for count in left]
        if options["even_batches"]:
            assert len(set(map(len, parts))) == 1
            assert loader.batch_size is None or len(set(map(tuple, lengths))) == 1
        if loader.batch_size is not None:  # else what the last batch holds is not known beforehand
            assert list(map(len, parts)) == list(steps)


def windows_of_accumulation():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    loader = accelerator.prepare(DataLoader(Stream(40), batch_size=2))
    model = torch.nn.Linear(1, 1)
    found = []
    for _ in loader:
        with accelerator.accumulate(model):
            found.append(accelerator.sync_gradients)
    return found


def test_a_stream_closes_its_last_window():
    """Ten batches in windows of four."""
    expected = [i in (3, 7, 9) for i in range(10)]
    assert run_ranks(windows_of_accumulation, 2) == [expected, expected]


def iterations_in_and_behind_a_block():
    accelerator = Accelerator(cpu=True, dispatch_batches=True)
    loader = accelerator.prepare(DataLoader(range(5), batch_size=2))
    with accelerator.join_uneven_inputs([], even_batches=False):
        inside = [batch.tolist() for batch in loader]
    return inside, [batch.tolist() for batch in loader]


def test_join_uneven_inputs_decides_about_iterations_that_begin_inside():
    first, second = run_ranks(iterations_in_and_behind_a_block, 2)
    assert first == ([[0, 1], [4]], [[0, 1], [4]])
    assert second == ([[2, 3]], [[2, 3], [0]])


Pair = namedtuple("Pair", ["ids", "names"])


def names(ids):
    return [f"name {i}" for i in ids]


def ragged(ids):
    return [torch.full((i % 3 + 1,), i) for i in ids]


COLLATES = {
    "dict": (
        lambda ids: {"ids": torch.tensor(ids), "names": names(ids), "none": None, "ragged": ragged(ids)},
        lambda batch: batch["ids"].tolist() if len(batch["names"]) == len(batch["ids"]) else "torn",
    ),
    "strings": (names, lambda batch: [int(name.split()[1]) for name in batch]),
    "ragged": (ragged, lambda batch: [int(tensor[0]) for tensor in batch]),
    "objects": (lambda ids: [Opaque(i) for i in ids], lambda batch: [item.ids for item in batch]),
    "opaque": (Opaque, lambda batch: batch.ids),
    "opaque inside": (lambda ids: {"it": Opaque(ids)}, lambda batch: batch["it"].ids),
    "named tuple": (lambda ids: Pair(torch.tensor(ids), names(ids)), lambda batch: batch.ids.tolist()),
    "tuple": (lambda ids: (torch.tensor(ids), torch.zeros(len(ids), 2)), lambda batch: batch[0].tolist()),
    "array": (lambda ids: {"ids": np.array(ids)}, lambda batch: batch["ids"].tolist()),
    "other keys": (
        lambda ids: {f"ids of {len(ids)}": torch.tensor(ids)},
        lambda batch: next(iter(batch.values())).tolist(),
    ),
    "other shapes": (lambda ids: torch.tensor([[i] * (len(ids) + 1) for i in ids]), lambda batch: batch[:, 0].tolist()),
}
MADE = {
    "numbers": ([0, 1, 2, 3, 4], lambda batch: [batch]),
    "nothing between": ([{"id": 0}, None, {"id": 1}, None, {"id": 2}], lambda batch: [batch["id"]] if batch else []),
    "batches": (
        [{"ids": torch.tensor(ids)} for ids in ([0], [1, 2, 3], [4, 5], [6, 7, 8])],
        lambda batch: batch["ids"].tolist(),
    ),
    "an uneven end": (
        [{"ids": torch.tensor(ids)} for ids in ([0, 1], [2, 3, 4], [5, 6, 7])],
        lambda batch: batch["ids"].tolist(),
    ),
    "samples": ([torch.tensor(i) for i in range(5)], lambda batch: [batch.item()]),
}


def batches_of_any_kind(even):
    found = {}
    for kind, (collate, ids) in COLLATES.items():
        found[kind] = pass_over(DataLoader(range(9), batch_size=2, collate_fn=collate), ids, even)
    for kind, (items, ids) in MADE.items():
        found[kind] = pass_over(DataLoader(Items(items), batch_size=None), ids, even)
    return found


def pass_over(loader, ids, even):
    feed = Feed()
    found = []
    for batch in dispatched(loader, feed, even_batches=even):
        rows = feed.current_rows()
        found.append((type(batch).__name__, ids(batch)[: None if rows is None else rows.real]))
    return found, {type(batch).__name__ for batch in loader}


@pytest.mark.parametrize("even", [True, False])
def test_any_batch_that_can_be_pickled_is_dispatched(even):
    """Neither equal shapes nor tensors are needed."""
    found = run_ranks(batches_of_any_kind, 2, even)
    for kind in (*COLLATES, *MADE):
        ranks = [by_rank[kind][0] for by_rank in found]
        ids = in_order([[ids for _, ids in batches] for batches in ranks])
        assert ids == list(range(len(ids))), kind
        assert len(ids) == {"numbers": 5, "samples": 5, "nothing between": 3, "an uneven end": 8}.get(kind, 9), kind
        assert {type_ for batches in ranks for type_, _ in batches} == found[0][kind][1], kind
        assert len(ranks[0]) - len(ranks[1]) in ({0} if even else {0, 1}), kind


def cut_by_hand(batch, part, process_index, num_processes):
    return {"ids": batch["ids"][part], "cut for": (process_index, num_processes, part.start, part.stop)}


def as_dict(ids):
    return {"ids": torch.tensor(ids)}


def slice_fns():
    accelerator = Accelerator(cpu=True, dispatch_batches=True)
    loader = DataLoader(range(5), batch_size=2, collate_fn=as_dict)
    by_accelerator = accelerator.prepare_data_loader(loader, slice_fn_for_dispatch=cut_by_hand)
    constructed = DataLoaderDispatcher(range(5), slice_fn=cut_by_hand, batch_size=2, collate_fn=as_dict)
    split = DataLoaderDispatcher(range(5), True, slice_fn=slice_tensors, batch_size=2, collate_fn=as_dict)
    return [list(by_accelerator), list(constructed), [batch["ids"].tolist() for batch in split]]


def test_a_slice_function_cuts_the_parts():
    first, second = run_ranks(slice_fns, 2)
    for mine, others in zip(first[:2], second[:2], strict=True):
        assert [batch["ids"].tolist() for batch in mine] == [[0, 1], [4]]
        assert [batch["ids"].tolist() for batch in others] == [[2, 3], [0]]
        assert [batch["cut for"] for batch in others] == [(1, 2, 2, 4), (1, 2, 1, 2)]
    assert (first[2], second[2]) == ([[0], [2], [4]], [[1], [3], [0]])


class Labelled(DataLoader):
    """A subclass that makes its batches by itself."""

    label = "kept"

    def __iter__(self):
        for batch in super().__iter__():
            yield batch + 1


class Told(Measured):
    """Each epoch has other samples."""

    epoch = None

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        return (100 * self.epoch + i for i in range(self.n))


def loops_that_are_left():
    """Iterations left after 0, 1, … steps, and a whole one; a subclass; epochs that are set."""
    loader = dispatched(DataLoader(range(60), batch_size=2), Feed())
    left = [len(taken(loader, loader._accel_outlet.feed, steps)) for steps in range(12)]
    whole = [batch.tolist() for batch in loader]
    labelled = dispatched(Labelled(range(9), batch_size=2), Feed())
    shuffled = dispatched(DataLoader(range(8), batch_size=4, shuffle=True), Feed())
    told = dispatched(DataLoader(Told(8), batch_size=4), Feed())
    epochs = []
    for one in (shuffled, told):
        epochs.append([batch.tolist() for _ in range(3) for batch in one])
        one.set_epoch(1)
        epochs.append([batch.tolist() for batch in one])
    return left, whole, (labelled.label, [batch.tolist() for batch in labelled]), epochs


def test_a_loop_can_be_left_at_any_batch_and_the_next_epoch_is_whole():
    ranks = run_ranks(loops_that_are_left, 2)
    assert in_order([whole for _, whole, _, _ in ranks]) == list(range(60))
    for left, _, (label, _), (shuffled, first, told, again) in ranks:
        assert left == list(range(12))
        assert label == "kept"
        assert first == shuffled[1:2]
        assert again == told[1:2]
        assert [batch[0] // 100 for batch in told] == [0, 1, 2]
    assert [batches for _, _, (_, batches), _ in ranks] == [[[1, 2], [5, 6], [9]], [[3, 4], [7, 8], [1]]]


class Workers(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return os.getpid()


def workers_of_two_epochs(persistent):
    loader = dispatched(DataLoader(Workers(), num_workers=1, persistent_workers=persistent), Feed())
    return [{pid for batch in loader for pid in batch.tolist()} for _ in range(2)]


def workers_that_persist_or_not():
    return {persistent: workers_of_two_epochs(persistent) for persistent in (True, False)}


def test_workers_persist_if_asked_to():
    for found in run_ranks(workers_that_persist_or_not, 2):
        assert {persistent: first == second for persistent, (first, second) in found.items()} == {
            True: True,
            False: False,
        }


def two_groups(members):
    world = World.current(cpu=True)
    groups = [world.subgroup(ranks) for ranks in members]
    number = [world.rank in ranks for ranks in members].index(True)
    feed = Feed()
    ids = range(100 * number, 100 * number + 9 - 4 * number)
    loader = dispatched(DataLoader(ids, batch_size=2), feed, group=groups[number])
    with pytest.raises(TypeError, match="A DataLoaderDispatcher of a group of ranks cannot be pickled"):
        pickle.dumps(loader)
    return [taken(loader, feed) for _ in range(2)]


@pytest.mark.parametrize("members", [([0, 1], [2, 3]), ([0, 2], [1, 3])])
def test_data_groups_dispatch_independently(members):
    found = run_ranks(two_groups, 4, members)
    for epoch in range(2):
        for ranks, expected in zip(members, (range(9), range(100, 105)), strict=True):
            assert in_order([found[rank][epoch] for rank in ranks]) == list(expected)


def lifetimes():
    kept = []

    def iterated(epochs):
        loader = dispatched(DataLoader(Stream(8), batch_size=2), Feed())
        for _ in range(epochs):
            kept[:] = list(loader)
        return loader

    def broken_out():
        iterator = iter(dispatched(DataLoader(range(8), batch_size=2), Feed()))
        next(iterator)
        return iterator

    assert_dies(lambda: iterated(0))
    assert_dies(lambda: iterated(2))
    assert_dies(lambda: iterated(1)._accel_source)
    assert_dies(broken_out)
    loader = iterated(1)
    World.current().end()
    return len(kept), loader.state_dict()["epoch"]


def test_a_dispatcher_dies_with_its_last_reference():
    assert run_ranks(lifetimes, 2) == [(2, 1), (2, 1)]
