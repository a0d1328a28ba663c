"""Inputs that processes split among themselves: who gets what, in which type, and what is refused."""

from __future__ import annotations

from collections import OrderedDict, UserDict, namedtuple
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import Subset, TensorDataset

from accel_core import Accelerator
from accel_core.launch_environment import Place
from accel_core.process import split_between_processes
from accel_core.testing import run_ranks
from accel_core.world import World

Pair = namedtuple("Pair", ["left", "right"])


def parts(inputs: Any, size: int, apply_padding: bool = False) -> list[Any]:
    """What each of `size` processes gets. Splitting is no collective, so the worlds need no processes."""
    found = []
    for rank in range(size):
        place = Place(rank=rank, size=size, local_rank=rank, local_size=size)
        world = World(place, torch.device("cpu"), torch.distributed.default_pg_timeout, None)
        with split_between_processes(inputs, world, apply_padding) as part:
            found.append(part)
    return found


def test_first_processes_get_one_more() -> None:
    assert parts(["A", "B", "C"], 2) == [["A", "B"], ["C"]]
    assert parts(list(range(8)), 3) == [[0, 1, 2], [3, 4, 5], [6, 7]]


def test_padding_repeats_the_last_element_of_all() -> None:
    assert parts(["A", "B", "C"], 2, apply_padding=True) == [["A", "B"], ["C", "C"]]
    assert parts(("A", "B", "C"), 2, apply_padding=True) == [("A", "B"), ("C", "C")]


def test_more_processes_than_elements_leave_some_empty() -> None:
    assert parts(["A"], 3) == [["A"], [], []]
    assert parts(["A", "B"], 3, apply_padding=True) == [["A"], ["B"], ["B"]]


@pytest.mark.parametrize("empty", [[], (), torch.zeros(0, 3), {}, {"a": []}, range(0)])
def test_empty_input_stays_empty(empty: Any) -> None:
    for part in parts(empty, 2, apply_padding=True):
        assert len(part.get("a", ()) if isinstance(part, dict) else part) == 0


@given(length=st.integers(0, 30), size=st.integers(1, 8))
def test_parts_together_are_the_input_in_order(length: int, size: int) -> None:
    inputs = list(range(length))
    split = parts(inputs, size)
    assert [element for part in split for element in part] == inputs
    assert max(map(len, split)) - min(map(len, split)) <= 1
    assert sorted(map(len, split), reverse=True) == list(map(len, split))


@given(length=st.integers(1, 30), size=st.integers(2, 8))
def test_padded_parts_are_the_plain_ones_and_then_the_last_element(length: int, size: int) -> None:
    inputs = list(range(length))
    for plain, padded in zip(parts(inputs, size), parts(inputs, size, apply_padding=True), strict=True):
        assert padded == plain + [length - 1] * (-(-length // size) - len(plain))


def test_tensors_are_split_along_dim_0_and_keep_dtype_and_the_other_dims() -> None:
    inputs = torch.arange(6, dtype=torch.int16).reshape(3, 2)
    first, second = parts(inputs, 2)
    assert first.equal(inputs[:2])
    assert second.equal(inputs[2:])
    assert parts(inputs, 2, apply_padding=True)[1].equal(inputs[[2, 2]])
    assert [tuple(part.shape) for part in parts(inputs, 5)] == [(1, 2), (1, 2), (1, 2), (0, 2), (0, 2)]
    assert [tuple(part.shape) for part in parts(inputs, 5, apply_padding=True)] == [(1, 2)] * 5


def test_a_tensor_without_padding_is_not_copied() -> None:
    inputs = torch.arange(4)
    assert parts(inputs, 2)[1].data_ptr() == inputs[2:].data_ptr()


def test_dicts_are_split_value_by_value_and_never_changed() -> None:
    inputs = {"text": ["A", "B", "C"], "ids": torch.arange(3), "more": {"left": (1, 2, 3)}}
    first, second = parts(inputs, 2, apply_padding=True)
    assert first["text"] == ["A", "B"]
    assert second["text"] == ["C", "C"]
    assert second["ids"].tolist() == [2, 2]
    assert second["more"] == {"left": (3, 3)}
    assert inputs["text"] == ["A", "B", "C"]
    assert len(inputs["ids"]) == len(inputs["more"]["left"]) == 3  # type: ignore[index,arg-type]


class Stored(MutableMapping[str, Any]):
    """A mapping of somebody's own, whose shallow copy shares the storage with it."""

    def __init__(self, content: Mapping[str, Any]) -> None:
        self.content = dict(content)

    def __getitem__(self, key: str) -> Any:
        return self.content[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self.content[key] = value

    def __delitem__(self, key: str) -> None:
        del self.content[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.content)

    def __len__(self) -> int:
        return len(self.content)


@pytest.mark.parametrize("kind", [dict, OrderedDict, UserDict, Stored])
def test_mappings_keep_their_type(kind: type) -> None:
    inputs = kind({"b": [1, 2], "a": [3, 4]})
    second = parts(inputs, 2)[1]
    assert type(second) is kind
    assert dict(second) == {"b": [2], "a": [4]}
    assert dict(inputs) == {"b": [1, 2], "a": [3, 4]}


class Frozen(Mapping[str, Any]):
    """A mapping that cannot be filled."""

    def __getitem__(self, key: str) -> Any:
        return {"a": [1, 2]}[key]

    def __iter__(self) -> Iterator[str]:
        return iter(["a"])

    def __len__(self) -> int:
        return 1


def test_parts_of_a_mapping_that_cannot_be_filled_are_dicts() -> None:
    assert parts(Frozen(), 2) == [{"a": [1]}, {"a": [2]}]


def test_parts_of_named_tuples_are_plain_tuples_and_of_other_sequences_lists() -> None:
    assert parts(Pair(1, 2), 2) == [(1,), (2,)]
    assert parts(range(3), 2, apply_padding=True) == [[0, 1], [2, 2]]


class Columns:
    """As datasets of other libraries are: slicing gives columns, `select` gives a dataset."""

    def __init__(self, rows: list[int]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Any) -> Any:
        raise AssertionError("a slice of this is no dataset")

    def select(self, indices: list[int]) -> Columns:
        return Columns([self.rows[index] for index in indices])


class Array:
    """As arrays and data frames of other libraries are: indexed in their own ways, but `take` takes rows."""

    def __init__(self, rows: list[int]) -> None:
        self.rows, self.shape = rows, (len(rows),)

    def __len__(self) -> int:
        return len(self.rows)

    def take(self, indices: list[int], axis: int) -> Array:
        assert axis == 0
        return Array([self.rows[index] for index in indices])


@pytest.mark.parametrize("kind", [Columns, Array])
def test_datasets_and_arrays_of_other_libraries_are_split_by_their_own_means(kind: type) -> None:
    assert [part.rows for part in parts(kind([7, 8, 9]), 2, apply_padding=True)] == [[7, 8], [9, 9]]


def test_parts_of_a_torch_dataset_are_subsets() -> None:
    inputs = TensorDataset(torch.arange(3), torch.arange(3))
    split = parts(inputs, 2)
    assert all(isinstance(part, Subset) for part in split)
    assert [[int(left) for left, _ in part] for part in split] == [[0, 1], [2]]


@pytest.mark.parametrize("inputs", ["abc", b"abc", {1, 2}, 3, None, iter([1]), {"a": "text"}])
@pytest.mark.parametrize("size", [1, 2])
def test_what_has_no_parts_is_refused_in_any_world(inputs: Any, size: int) -> None:
    with pytest.raises(TypeError, match=r"cannot split inputs.*It takes lists.*\[input\]"):
        parts(inputs, size)


def test_tensor_without_dimensions_is_refused() -> None:
    with pytest.raises(TypeError, match=r"inputs\['t'\] is a tensor without dimensions"):
        parts({"t": torch.tensor(1)}, 2)


def test_values_of_different_length_are_refused_with_their_lengths() -> None:
    with pytest.raises(ValueError, match=r"inputs\['a'\] has 2, inputs\['b'\] has 3"):
        parts({"a": [1, 2], "b": [1, 2, 3]}, 2)


def test_alone_the_input_comes_back_as_it_is() -> None:
    inputs = [1, 2]
    with Accelerator(cpu=True).split_between_processes(inputs, apply_padding=True) as part:
        assert part is inputs


def split_for_real() -> list[str]:
    with Accelerator(cpu=True).split_between_processes(["A", "B", "C"], apply_padding=True) as part:
        return list(part)


def test_ranks_split() -> None:
    assert run_ranks(split_for_real, 2) == [["A", "B"], ["C", "C"]]
