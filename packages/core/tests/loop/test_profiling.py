"""Profiling a block: what is recorded, which files are written, what is refused, and what errors leave behind."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from accel_core import Accelerator, ProfileKwargs, World
from accel_core.loop.profiling import profile
from accel_testing import run_ranks

CYCLES = {"wait": 1, "warmup": 1, "active": 1}


@pytest.fixture(autouse=True)
def no_profiler_is_left() -> Iterator[None]:
    with warnings.catch_warnings():
        # Said once per process: events of earlier cycles are gone. They are in their files by then.
        warnings.filterwarnings("ignore", message=".*clears events at the end of each cycle")
        yield
    assert not torch.autograd._profiler_enabled()


def work() -> torch.Tensor:
    return torch.ones(4, 4) @ torch.ones(4, 4)


def operators(path: Path) -> set[str]:
    """The names of what a Chrome trace shows."""
    return {event.get("name") for event in json.loads(path.read_text())["traceEvents"]}


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def keys(profiler: torch.profiler.profile) -> set[str]:
    return {event.key for event in profiler.key_averages()}


def steps(profiler: torch.profiler.profile, count: int) -> None:
    for _ in range(count):
        work()
        profiler.step()


def test_a_block_is_profiled_without_any_option() -> None:
    with Accelerator().profile() as profiler:
        work()
    assert "aten::mm" in keys(profiler)


def test_the_options_reach_the_profiler() -> None:
    handler = ProfileKwargs(
        activities=["CPU", torch.profiler.ProfilerActivity.CPU],
        record_shapes=True,
        profile_memory=True,
        with_flops=True,
    )
    with Accelerator(kwargs_handlers=[handler]).profile() as profiler:
        work()
    products = [event for event in profiler.key_averages(group_by_input_shape=True) if event.key == "aten::mm"]
    assert [event.input_shapes for event in products] == [[[4, 4], [4, 4]]]
    assert products[0].flops == 2 * 4 * 4 * 4
    assert any(event.self_cpu_memory_usage > 0 for event in profiler.key_averages())


def test_a_handler_of_the_call_stands_before_that_of_the_accelerator(tmp_path: Path) -> None:
    accelerator = Accelerator(kwargs_handlers=[ProfileKwargs(output_trace_dir=tmp_path / "all")])
    with accelerator.profile(ProfileKwargs(output_trace_dir=tmp_path / "one")):
        work()
    assert files(tmp_path) == ["one"]
    with accelerator.profile():
        work()
    assert files(tmp_path) == ["all", "one"]


def test_a_trace_is_written_into_a_new_folder(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "traces"
    with Accelerator().profile(ProfileKwargs(output_trace_dir=str(folder))):
        work()
    assert files(folder) == ["profile_0.json"]
    assert "aten::mm" in operators(folder / "profile_0.json")


def test_nothing_is_overwritten_by_later_blocks(tmp_path: Path) -> None:
    accelerator = Accelerator(kwargs_handlers=[ProfileKwargs(output_trace_dir=tmp_path)])
    with accelerator.profile():
        work()
    first = (tmp_path / "profile_0.json").read_bytes()
    with accelerator.profile():
        torch.zeros(2).exp()
    assert files(tmp_path) == ["profile_0.json", "profile_0_1.json"]
    assert (tmp_path / "profile_0.json").read_bytes() == first
    assert "aten::exp" in operators(tmp_path / "profile_0_1.json")


def test_each_cycle_of_a_schedule_is_a_file_and_a_call(tmp_path: Path) -> None:
    calls: list[int] = []
    handler = ProfileKwargs(
        schedule_option={**CYCLES, "repeat": 2, "skip_first": 1},
        on_trace_ready=lambda profiler: calls.append(profiler.step_num),
        output_trace_dir=tmp_path,
    )
    with Accelerator(kwargs_handlers=[handler]).profile() as profiler:
        steps(profiler, 10)
    assert calls == [4, 7]
    assert files(tmp_path) == ["profile_0.json", "profile_0_1.json"]
    assert "ProfilerStep#3" in operators(tmp_path / "profile_0.json")
    assert "ProfilerStep#6" in operators(tmp_path / "profile_0_1.json")
    assert "aten::mm" in operators(tmp_path / "profile_0_1.json")


def test_a_cycle_that_the_block_leaves_open_is_written(tmp_path: Path) -> None:
    handler = ProfileKwargs(schedule_option={**CYCLES, "active": 5}, output_trace_dir=tmp_path)
    with Accelerator().profile(handler) as profiler:
        steps(profiler, 4)
    assert "aten::mm" in operators(tmp_path / "profile_0.json")


def test_a_schedule_in_which_nothing_was_recorded_is_a_warning() -> None:
    with (
        pytest.warns(UserWarning, match=r"nothing was recorded: step\(\) of the profiler was called 0 times") as said,
        Accelerator().profile(ProfileKwargs(schedule_option=CYCLES)),
    ):
        work()
    assert said[0].filename == __file__


def test_an_error_in_the_block_reaches_the_user_and_the_trace_is_kept(tmp_path: Path) -> None:
    with (
        pytest.raises(ZeroDivisionError),
        Accelerator().profile(ProfileKwargs(output_trace_dir=tmp_path)),
    ):
        work()
        _ = 1 / 0
    assert "aten::mm" in operators(tmp_path / "profile_0.json")


def fail(profiler: torch.profiler.profile) -> None:
    raise KeyError("mine")


@pytest.mark.parametrize("schedule", [None, CYCLES])
def test_an_error_in_on_trace_ready_reaches_the_user(schedule: dict[str, int] | None) -> None:
    with (
        pytest.raises(KeyError, match="mine"),
        Accelerator().profile(ProfileKwargs(schedule_option=schedule, on_trace_ready=fail)) as profiler,
    ):
        steps(profiler, 6)


@pytest.mark.parametrize("activity", ["cpo", 3])
def test_an_activity_that_torch_cannot_record_is_refused_with_those_that_it_can(activity: Any) -> None:
    with pytest.raises(
        ValueError, match=f"holds {activity!r}, which torch cannot record here, only .*cpu.* Leave activities out"
    ):
        ProfileKwargs(activities=["cpu", activity]).build()


def test_what_is_wrong_with_a_schedule_torch_says() -> None:
    with pytest.raises(TypeError, match="skip_fist"):
        ProfileKwargs(schedule_option={**CYCLES, "skip_fist": 1}).build()


def test_only_what_differs_is_passed_on() -> None:
    assert ProfileKwargs().to_kwargs() == {}
    assert ProfileKwargs(with_stack=True).to_kwargs() == {"with_stack": True}


def alone_and_together(folder: str) -> bool:
    """Rank 1 profiles once more, alone."""
    world = World.current(cpu=True)
    handler = ProfileKwargs(output_trace_dir=folder)
    for _ in range(1 + world.rank):
        with profile(handler, world) as profiler:
            work()
    return "aten::mm" in keys(profiler)


def test_ranks_write_files_of_their_own_and_never_wait_for_each_other(tmp_path: Path) -> None:
    assert run_ranks(alone_and_together, 2, str(tmp_path)) == [True, True]
    assert files(tmp_path) == ["profile_0.json", "profile_1.json", "profile_1_1.json"]


def test_a_profiler_is_built_without_an_accelerator() -> None:
    with ProfileKwargs(activities=["cpu"]).build() as profiler:
        work()
    assert "aten::mm" in keys(profiler)
