"""What processes do by their place: inputs split among them, functions that some of them run, blocks that one runs first."""

from __future__ import annotations

import asyncio
import inspect
import re
import time
from collections import OrderedDict, UserDict, namedtuple
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import Subset, TensorDataset

from accel_core import Accelerator
from accel_core.collectives import objects, reduce_gather
from accel_core.collectives.splitting import split_between_processes
from accel_core.processes.launch_environment import Place
from accel_core.processes.world import World
from accel_core.state import PartialState
from accel_testing import run_ranks

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
    with pytest.raises(TypeError, match="0-d tensor"):
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


def world_of(rank: int, size: int, local_rank: int | None = None, local_size: int | None = None) -> World:
    """A world as one of its ranks sees it; choosing who runs a function needs no other process."""
    local_rank, local_size = rank if local_rank is None else local_rank, local_size or size
    place = Place(rank=rank, size=size, local_rank=local_rank, local_size=local_size)
    return World(place, torch.device("cpu"), torch.distributed.default_pg_timeout, None)


def who_runs(decorate: Callable[[PartialState], Callable[[Any], Any]], size: int, per_machine: int) -> list[int]:
    """The ranks on which a function that `decorate` has decorated does something."""
    states = [PartialState.of(world_of(rank, size, rank % per_machine, per_machine)) for rank in range(size)]
    return [state.process_index for state in states if decorate(state)(lambda: "ran")() == "ran"]


@pytest.mark.parametrize(
    ("decorate", "expected"),
    [
        (lambda state: state.on_main_process, [0]),
        (lambda state: state.on_main_process(), [0]),
        (lambda state: state.on_local_main_process, [0, 2]),
        (lambda state: state.on_local_main_process(), [0, 2]),
        (lambda state: state.on_last_process, [3]),
        (lambda state: state.on_last_process(), [3]),
        (lambda state: state.on_process(process_index=2), [2]),
        (lambda state: state.on_process(process_index=-1), [3]),
        (lambda state: lambda function: state.on_process(function, 1), [1]),
        (lambda state: lambda function: state.on_process(function=function, process_index=-4), [0]),
        (lambda state: state.on_local_process(local_process_index=1), [1, 3]),
        (lambda state: state.on_local_process(local_process_index=-2), [0, 2]),
        (lambda state: lambda function: state.on_local_process(function, 0), [0, 2]),
    ],
)
def test_decorated_functions_run_on_their_processes_and_give_none_elsewhere(
    decorate: Callable[[PartialState], Callable[[Any], Any]], expected: list[int]
) -> None:
    assert who_runs(decorate, size=4, per_machine=2) == expected


def test_alone_every_decorated_function_runs_whatever_its_index() -> None:
    for decorate in (
        lambda state: state.on_last_process,
        lambda state: state.on_process(process_index=3),
        lambda state: state.on_local_process(local_process_index=-3),
    ):
        assert who_runs(decorate, size=1, per_machine=1) == [0]


def test_decorated_functions_keep_what_they_say_about_themselves() -> None:
    main = PartialState.of(world_of(0, 2))

    def scaled(value: int, *, by: int = 2) -> int:
        """Says what it does."""
        return value * by

    for decorated in (
        main.on_main_process(scaled),
        main.on_process(process_index=0)(scaled),
        main.on_local_process(scaled, local_process_index=0),
    ):
        assert (decorated.__name__, decorated.__doc__) == ("scaled", "Says what it does.")
        assert inspect.signature(decorated) == inspect.signature(scaled)
        assert decorated(3, by=4) == 12


def test_methods_and_coroutines_can_be_decorated() -> None:
    main, other = (PartialState.of(world_of(rank, 2)) for rank in range(2))

    class Report:
        title = "loss"

        @main.on_main_process
        def here(self) -> str:
            return self.title

        @other.on_main_process
        def elsewhere(self) -> str:
            return self.title

        @main.on_main_process()
        async def later(self) -> str:
            return self.title

        @other.on_main_process()
        async def never(self) -> str:
            return self.title

    report = Report()
    assert (report.here(), report.elsewhere()) == ("loss", None)
    assert inspect.iscoroutinefunction(report.never)
    assert (asyncio.run(report.later()), asyncio.run(report.never())) == ("loss", None)


def test_a_process_that_does_not_exist_is_refused_where_the_decorator_stands() -> None:
    state = PartialState.of(world_of(2, 4, 0, 2))
    for index in (4, -5):
        with pytest.raises(
            ValueError, match=rf"process_index={index}\): there is no such.*run has 4 .*0 to 3.*=-1 for"
        ):
            state.on_process(process_index=index)
    with pytest.raises(
        ValueError, match=r"local_process_index=2\): there is no such.*machine has 2 .*0 to 1, or -2 to -1"
    ):
        state.on_local_process(local_process_index=2)


@pytest.mark.parametrize("index", [None, True, 1.0, "1"])
def test_an_index_that_is_no_integer_is_refused_in_any_world(index: Any) -> None:
    for size in (1, 4):
        with pytest.raises(TypeError, match=r"expected the index of a process; this run has .*Type process_index=0"):
            PartialState.of(world_of(0, size)).on_process(process_index=index)


def test_the_older_spelling_of_the_local_index_works_and_says_the_new_one() -> None:
    state = PartialState.of(world_of(0, 2))
    with pytest.warns(FutureWarning, match="local_process_idx= is an older.*Write local_process_index="):
        assert state.on_local_process(local_process_idx=0)(lambda: "ran")() == "ran"


def all_but_leaders_see(state: PartialState, block: AbstractContextManager[None], leads: bool, mark: Path) -> bool:
    """Whether the leader's block was over when this rank's began; the leader first waits until the others are at theirs."""
    store = torch.distributed.distributed_c10d._get_default_store()
    if not leads:
        store.set(f"{mark.name}/{state.process_index}", "here")
    with block:
        if leads:
            machine = range(state.num_processes) if mark.name == "all" else [state.process_index + 1]
            store.wait([f"{mark.name}/{rank}" for rank in machine if rank != state.process_index])
            mark.touch()
        return mark.exists()


def outcome(block: AbstractContextManager[None], inside: Callable[[], object]) -> str:
    try:
        with block:
            inside()
    except Exception as error:  # what this is about
        return f"{type(error).__name__}: {error}"
    return "left"


def take_turns(folder: Path) -> dict[str, Any]:
    state = PartialState(cpu=True)
    leads = state.is_main_process
    found: dict[str, Any] = {
        "others come after": all_but_leaders_see(state, state.main_process_first(), leads, folder / "all")
    }

    def fail() -> None:
        raise KeyError("no such file") if leads else AssertionError("came in")

    def nest() -> None:
        with state.main_process_first(), PartialState().local_main_process_first():
            (folder / "nested").touch()

    def fail_in_nested() -> None:
        with state.main_process_first():
            fail()

    def gather() -> None:
        if leads:
            reduce_gather.gather(torch.ones(1), state._world)
        else:
            raise AssertionError("came in")

    found["failure"] = outcome(state.main_process_first(), fail)
    found["failure of a follower"] = outcome(state.main_process_first(), lambda: None if leads else fail())
    found["nested"] = outcome(state.main_process_first(), nest)
    found["failure in nested"] = outcome(state.main_process_first(), fail_in_nested)
    found["collective"] = outcome(state.main_process_first(), gather)
    found["afterwards"] = objects.gather_objects([outcome(state.main_process_first(), nest)], state._world)
    return found


def test_the_main_process_goes_first_and_everybody_hears_of_its_failure(tmp_path: Path) -> None:
    main, *others = run_ranks(take_turns, 3, tmp_path)
    assert all(found["others come after"] for found in (main, *others))
    assert main["failure"] == main["failure in nested"] == "KeyError: 'no such file'"
    for rank, found in enumerate(others, start=1):
        assert re.search(
            r"main_process_first\(\) was called.*rank 0: KeyError: 'no such file' \(.*in fail\)\n"
            rf"Mend that one: the error of rank {rank} only",
            found["failure"],
        )
        assert "rank 0: KeyError" in found["failure in nested"]
        assert found["failure of a follower"] == "AssertionError: came in"
    assert main["failure of a follower"] == "left"
    for found in (main, *others):
        assert found["nested"] == "left"
        assert re.search(
            r"CollectiveMismatchError: [^$]*rank 0: gather[^$]*rank 1, 2: main_process_first\(\)", found["collective"]
        )
        assert found["afterwards"] == ["left"] * 3


def take_turns_by_machine(folder: Path) -> dict[str, Any]:
    """Four ranks, of which two and two are told that they share a machine."""
    alike = World.current(cpu=True)
    place = Place(rank=alike.rank, size=4, local_rank=alike.rank % 2, local_size=2)
    state = PartialState.of(World(place, alike.device, alike.timeout, alike.group))
    leads = state.is_local_main_process
    mark = folder / f"machine{state.process_index // 2}"

    def fail() -> None:
        if state.process_index == 2:
            raise KeyError("no such file")

    def nest() -> None:
        with state.main_process_first():
            raise AssertionError("came in")

    return {
        "others come after": all_but_leaders_see(state, state.local_main_process_first(), leads, mark),
        "failure": outcome(state.local_main_process_first(), fail),
        "nested": outcome(state.local_main_process_first(), nest),
        "afterwards": outcome(state.main_process_first(), lambda: None),
    }


def test_the_first_of_each_machine_goes_first_and_everybody_hears_of_its_failure(tmp_path: Path) -> None:
    found = run_ranks(take_turns_by_machine, 4, tmp_path)
    assert all(rank["others come after"] for rank in found)
    assert found[2]["failure"] == "KeyError: 'no such file'"
    for rank in (0, 1, 3):
        assert re.search(r"local_main_process_first\(\) was called.*: rank 2: KeyError", found[rank]["failure"])
    for rank in (0, 2):
        assert found[rank]["nested"].startswith(
            "RuntimeError: main_process_first() was called inside of local_main_process_first()"
        )
        assert "Write the blocks one after the other" in found[rank]["nested"]
    assert re.search("rank 0: RuntimeError: .*; rank 2: RuntimeError: ", found[1]["nested"])
    assert [rank["afterwards"] for rank in found] == ["left"] * 4


def test_alone_nobody_waits_and_errors_are_what_they_were() -> None:
    state = PartialState(cpu=True)
    with state.main_process_first(), state.local_main_process_first(), state.main_process_first():
        pass
    with pytest.raises(KeyError), state.main_process_first():
        raise KeyError


def take_longer_than_the_timeout() -> list[Any]:
    state = PartialState(cpu=True, timeout=timedelta(seconds=1))
    with state.main_process_first():
        if state.is_main_process:
            time.sleep(2.5)  # what takes long
    gathered = reduce_gather.gather(torch.tensor([state.process_index]), state._world)
    backend = state._world.group._get_backend(torch.device("cpu"))  # type: ignore[union-attr]
    return [gathered.tolist(), backend.options._timeout]


def test_the_others_wait_for_longer_than_the_timeout_which_holds_again_afterwards() -> None:
    assert run_ranks(take_longer_than_the_timeout, 2) == [[[0, 1], timedelta(seconds=1)]] * 2
