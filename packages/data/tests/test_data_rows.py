"""What a row of a batch is: counted, cut and joined, for whatever collate functions make."""

from __future__ import annotations

from collections import UserDict, defaultdict, namedtuple

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import default_collate

from accel_data.batch_rows import Unsplittable, concatenate, count_rows, slice_rows, slice_tensors

Pair = namedtuple("Pair", ["x", "y"])

SAMPLES = {
    "tensors": lambda i: torch.full((3,), i),
    "scalars": lambda i: torch.tensor(i),
    "numbers": lambda i: i,
    "strings": lambda i: f"sample {i}",
    "arrays": lambda i: np.full((2,), i),
    "tuples": lambda i: (torch.full((3,), i), i, f"sample {i}"),
    "dicts": lambda i: {"x": torch.full((2, 2), i), "name": str(i), "weight": 0.5 * i},
    "named tuples": lambda i: Pair(torch.full((3,), i), i),
    "nested": lambda i: {"a": [torch.full((3,), i), {"b": i}], "c": (str(i), (i, torch.full((1, 2), i)))},
    "pairs of strings": lambda i: (f"question {i}", f"answer {i}"),
    "square": lambda i: (torch.full((2,), i), torch.full((2,), -i)),
}


def same(one, other):
    if isinstance(one, (torch.Tensor, np.ndarray)):
        return type(one) is type(other) and one.shape == other.shape and bool((one == other).all())
    if isinstance(one, dict):
        return type(one) is type(other) and list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))  # default_collate gives tuples of strings
    return one == other


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("kind", SAMPLES)
def test_what_default_collate_makes_is_cut_and_joined_like_the_samples(kind, size):
    samples = [SAMPLES[kind](i) for i in range(size)]
    batch = default_collate(samples)
    assert count_rows(batch, expected=size) == size
    cuts = [(start, stop) for start in range(size) for stop in range(start + 1, size + 1)]
    for start, stop in cuts:
        assert same(slice_rows(batch, start, stop, size), default_collate(samples[start:stop]))
    parts = [default_collate(samples[:1]), default_collate(samples)]
    assert same(concatenate(parts, [1, size]), default_collate([samples[0], *samples]))


LISTED = {
    **{kind: make for kind, make in SAMPLES.items() if kind != "pairs of strings"},
    "ragged": lambda i: torch.arange(i + 2),
    "ragged tuples": lambda i: (torch.arange(i + 1), i),
    "as wide as the batch": lambda i: (torch.full((5,), i), i),
    "all as wide as the batch": lambda i: (torch.full((5,), i), torch.full((5, 2), i)),
    "None": lambda i: None,
    "objects": lambda i: {"image": object, "boxes": [i] * i},
}


@pytest.mark.parametrize("kind", LISTED)
def test_samples_that_are_left_as_a_list_are_rows_whatever_they_are(kind):
    samples = [LISTED[kind](i) for i in range(5)]
    assert count_rows(samples, expected=5) == 5
    assert same(slice_rows(samples, 1, 4, 5), samples[1:4])
    assert same(concatenate([samples, samples[:3]], [5, 3]), samples + samples[:3])


@pytest.mark.parametrize(
    ("batch", "rows"),
    [
        (torch.zeros(4, 2), 4),
        ([torch.zeros(4, 2), torch.zeros(4)], 4),
        ({"text": ["a", "b", "c"], "x": torch.zeros(3)}, 3),
        ({"text": ["a", "b", "c"], "more": {"text": ["a", "b", "c"]}}, 3),
        ({"ids": [torch.zeros(3), torch.zeros(1)], "y": torch.zeros(2)}, 2),
        ([torch.zeros(2), torch.zeros(3), torch.zeros(1)], 3),
        (["a", "b"], 2),
        ([], 0),
        (torch.zeros(0, 3), 0),
        (np.zeros((3, 2)), 3),
        ({"x": torch.zeros(2), "classes": ["cat", "dog", "fox"], "step": 7}, 2),
        (torch.zeros(()), None),
        ("text", None),
        (None, None),
        ({}, None),
        ({"x": torch.zeros(2), "y": torch.zeros(3)}, None),
        ({"x": torch.zeros(2), "packed": pack_sequence([torch.zeros(2), torch.zeros(1)])}, None),
        (torch.eye(3).to_sparse(), None),
    ],
    ids=str,
)
def test_the_number_of_rows_is_found_without_being_told(batch, rows):
    assert count_rows(batch) == rows


def test_the_expected_number_decides_where_a_batch_can_be_read_in_several_ways():
    batch = [torch.zeros(5)] * 3
    assert count_rows(batch) == count_rows(batch, expected=5) == 5
    assert count_rows(batch, expected=3) == 3
    assert count_rows(batch, expected=4) == 5  # the collate function left none out of 5


@pytest.mark.parametrize("rows", [2, 3, 4])
def test_columns_beside_something_that_has_no_rows_stay_columns_whatever_their_number(rows):
    batch = (torch.arange(rows), torch.arange(rows), {"source": "a file"})
    assert count_rows(batch) == count_rows(batch, expected=rows) == rows
    x, y, rest = slice_rows(batch, 1, 2, rows)
    assert (x.tolist(), y.tolist(), rest) == ([1], [1], {"source": "a file"})


def test_types_of_containers_survive_and_what_has_no_rows_goes_to_everyone():
    batch = UserDict(pair=Pair(torch.arange(4), list("abcd")), step=7, scale=torch.tensor(2.0))
    batch.origin = "a file"
    part = slice_rows(batch, 1, 3, 4)
    assert (type(part), part.origin, part["step"], part["scale"]) == (UserDict, "a file", 7, torch.tensor(2.0))
    assert isinstance(part["pair"], Pair)
    assert (part["pair"].x.tolist(), part["pair"].y) == ([1, 2], ["b", "c"])
    assert batch["pair"].y == list("abcd")
    joined = concatenate([part, batch], [2, 4])
    assert (joined["pair"].x.tolist(), joined["pair"].y) == ([1, 2, 0, 1, 2, 3], list("bcabcd"))
    assert slice_rows(defaultdict(int, x=torch.arange(2)), 0, 1, 2).default_factory is int


def test_rows_are_views_of_the_batch():
    batch = {"x": torch.zeros(4, 2)}
    slice_rows(batch, 1, 3, 4)["x"].fill_(1)
    assert batch["x"].sum(1).tolist() == [0, 2, 2, 0]


def test_slice_tensors_cuts_every_tensor_and_nothing_else():
    batch = {"x": torch.arange(4), "y": [torch.arange(8).view(4, 2), ("a", "b")], "n": 3, "s": torch.tensor(1)}
    part = slice_tensors(batch, slice(1, 3), process_index=0, num_processes=2)
    assert part["x"].tolist() == [1, 2]
    assert part["y"][0].tolist() == [[2, 3], [4, 5]]
    assert (part["y"][1], part["n"], part["s"]) == (("a", "b"), 3, torch.tensor(1))


@pytest.mark.parametrize(
    ("batches", "rows", "message"),
    [
        (
            [torch.zeros(2, 3), torch.zeros(2, 4)],
            [2, 2],
            r"batch has shapes that differ beyond the rows: \(2, 3\), \(2, 4\)",
        ),
        ([{"x": torch.zeros(2)}, {"y": torch.zeros(2)}], [2, 2], r"batch has different keys: \['x'\], \['y'\]"),
        (
            [{"x": [torch.zeros(3), 1]}, {"x": [torch.zeros(3), 2]}],
            [3, 3],
            r"batch\['x'\]\[1\] has no rows and differs",
        ),
        ([[torch.zeros(3)] * 2, [torch.zeros(3)]], [3, 3], r"batch has different lengths: 2, 1"),
        ([torch.zeros(1), ["a"]], [1, 1], r"batch has different types: 'Tensor', 'list'"),
        (
            [{"x": torch.zeros(2), "y": torch.tensor(1)}, {"x": torch.zeros(2), "y": torch.zeros(2)}],
            [2, 2],
            r"batch\['y'\] has rows",
        ),
        ([torch.zeros(2), torch.zeros(3)], [2, 2], r"this Tensor cannot be cut into 2 rows"),
        (["text", "text"], [4, 4], r"this str cannot be cut into 4 rows"),
    ],
)
def test_batches_that_do_not_fit_together_say_where_and_what_to_do(batches, rows, message):
    with pytest.raises(Unsplittable, match=message) as caught:
        concatenate(batches, rows)
    for advice in ("slice_fn_for_dispatch", "split_batches=False", "dispatch_batches=False"):
        assert advice in str(caught.value)


def test_dtypes_may_differ_where_torch_can_join_them():
    assert concatenate([torch.zeros(1, dtype=torch.int32), torch.ones(1)], [1, 1]).tolist() == [0.0, 1.0]
    with pytest.raises(Unsplittable, match=r"batch\['x'\] cannot be joined"):
        concatenate([{"x": np.zeros(1)}, {"x": np.zeros(1, dtype="M8[s]")}], [1, 1])


def test_cutting_a_batch_without_rows_is_refused():
    with pytest.raises(Unsplittable, match="this dict cannot be cut into 3 rows"):
        slice_rows({"x": torch.zeros(2)}, 0, 1, 3)
