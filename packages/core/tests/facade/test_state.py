"""The set-up as an object: of the processes, without an Accelerator, and the read-only view of an Accelerator's."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from accel_core import DDP, Accelerator, Single, Strategy
from accel_core.base.errors import WorldError
from accel_core.base.vocabulary import DistributedType
from accel_core.processes.launch_environment import Place
from accel_core.processes.world import World
from accel_core.state import AcceleratorState, PartialState
from accel_testing import run_ranks

SECONDS = timedelta(seconds=77)


def world_of(rank: int, size: int, device: str = "cpu") -> World:
    place = Place(rank=rank, size=size, local_rank=rank, local_size=size)
    return World(place, torch.device(device), SECONDS, None)


class Hello(Strategy):
    """A third party's, which declares nothing."""

    def prepare_model(self, model: nn.Module, optimizers: Any, request: Any) -> nn.Module:
        raise NotImplementedError


class Greeting(Hello):
    distributed_type = "FSDP"
    older_names = ("good_morning",)


def state_of(strategies: Mapping[str, Strategy], name: str = "", world: World | None = None) -> AcceleratorState:
    strategies = MappingProxyType(dict(strategies))
    return AcceleratorState(world or world_of(0, 1), "bf16", strategies, name or next(iter(strategies)))


def test_alone_a_partial_state_needs_no_group() -> None:
    state = PartialState(cpu=True)
    assert (state.process_index, state.local_process_index, state.num_processes) == (0, 0, 1)
    assert state.is_main_process
    assert state.is_local_main_process
    assert state.is_last_process
    assert not state.use_distributed
    assert state.device == torch.device("cpu")
    assert state.distributed_type is DistributedType.NO
    assert (state.backend, state.initialized) == (None, True)
    assert state.default_device == (torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu"))
    state.set_device()
    state.wait_for_everyone()
    with state.split_between_processes([1, 2]) as part:
        assert part == [1, 2]
    state.destroy_process_group()
    state.destroy_process_group()


def test_printing_a_state_shows_one_fact_a_line() -> None:
    assert repr(PartialState.of(world_of(1, 4))).splitlines() == [
        "Distributed type: MULTI_CPU",
        "Processes: 4",
        "Process index: 1",
        "Local process index: 1",
        "Device: cpu",
    ]
    assert repr(state_of({"hello": Hello()})).splitlines()[5:] == ["Mixed precision: bf16", "Strategy: hello"]
    assert "Strategies: a, b" in repr(state_of({"a": DDP(), "b": DDP()}, "ddp"))


def test_print_prints_once_per_machine(capsys: pytest.CaptureFixture[str]) -> None:
    for rank in range(3):
        PartialState.of(world_of(rank, 3)).print("rank", rank, sep="=", end="!")
    assert capsys.readouterr().out == "rank=0!"


def test_the_environment_answers_for_what_was_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "perhaps")
    with pytest.raises(ValueError, match="ACCELERATE_USE_CPU='perhaps' is not a truth value"):
        PartialState()
    assert PartialState(cpu=True).debug is False
    monkeypatch.setenv("ACCELERATE_DEBUG_MODE", "1")
    state = PartialState(cpu=True)
    monkeypatch.delenv("ACCELERATE_DEBUG_MODE")
    assert state.debug is True
    assert PartialState(cpu=True).debug is False


def test_a_text_is_no_truth_value() -> None:
    with pytest.raises(TypeError, match="cpu='no' is a str: expected True or False"):
        PartialState(cpu="no")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("device", "expected"), [("cpu", "MULTI_CPU"), ("cuda", "MULTI_GPU"), ("xla", "XLA"), ("meta", "MULTI_META")]
)
def test_several_processes_are_named_after_their_type_of_device(device: str, expected: str) -> None:
    world = world_of(0, 2, device)
    assert PartialState.of(world).distributed_type == expected
    assert state_of({"ddp": DDP()}, world=world).distributed_type == expected


def test_a_strategy_declares_its_distributed_type_or_has_its_name() -> None:
    world = world_of(0, 2)
    assert state_of({"single": Single()}).distributed_type is DistributedType.NO
    assert state_of({"x": Greeting()}, world=world).distributed_type is DistributedType.FSDP
    assert state_of({"hello": Hello()}, world=world).distributed_type == "hello"
    assert state_of({"hello": Hello()}).distributed_type == "hello"


def test_an_object_has_the_name_under_which_its_package_offers_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    installed = tmp_path / "waving-1.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: waving\nVersion: 1.0\n")
    (installed / "entry_points.txt").write_text(f"[accel.strategies]\nwaves = {Hello.__module__}.inside:Hello\n")
    monkeypatch.syspath_prepend(tmp_path)
    state = state_of({"Hello": Hello()})
    assert state.distributed_type == "waves"
    assert state.waves_plugin is state.hello_plugin is state.strategy
    assert state_of({"ddp": DDP()}).waves_plugin is None


def test_a_state_of_an_accelerator_has_what_a_partial_state_has() -> None:
    state = state_of({"ddp": DDP()}, world=world_of(1, 2))
    assert (state.process_index, state.num_processes, state.is_last_process) == (1, 2, True)
    assert (state.mixed_precision, state.debug) == ("bf16", False)
    assert state.on_last_process(lambda: "ran")() == "ran"


def test_the_plugin_of_the_strategy_in_use_is_found_under_each_of_its_names() -> None:
    greeting = Greeting()
    state = state_of({"polite": greeting})
    assert state.strategy is greeting
    for name in ("polite", "greeting", "good_morning"):
        assert getattr(state, f"{name}_plugin") is greeting
        assert getattr(state, f"get_{name}_plugin")() is greeting
        assert getattr(state, f"get_{name}_plugin")("polite") is greeting
        assert dict(getattr(state, f"{name}_plugins")) == {"polite": greeting}


def test_plugins_of_strategies_that_are_not_in_use_are_none() -> None:
    state = state_of({"ddp": DDP()})
    for name in ("deepspeed", "fsdp", "single"):
        assert getattr(state, f"{name}_plugin") is None
        assert getattr(state, f"{name}_plugins") is None
        with pytest.raises(
            ValueError, match=rf"get_{name}_plugin\(\) was asked for.*there is none, and in use is 'ddp'"
        ):
            getattr(state, f"get_{name}_plugin")()


def test_several_configured_strategies_are_found_by_key() -> None:
    teacher, student, other = DDP(), DDP(bucket_cap_mb=1), Hello()
    state = state_of({"teacher": teacher, "student": student, "other": other}, "ddp")
    assert state.strategy is state.ddp_plugin is state.get_ddp_plugin("teacher") is teacher
    assert state.get_ddp_plugin("student") is state.strategies["student"] is student
    assert dict(state.ddp_plugins) == {"teacher": teacher, "student": student}
    assert state.hello_plugin is None
    assert state.get_hello_plugin("other") is other
    with pytest.raises(
        ValueError, match=r"get_ddp_plugin\('other'\) .* there is 'teacher', 'student', and in use is 'te.*"
    ):
        state.get_ddp_plugin("other")
    with pytest.raises(TypeError, match="does not support item assignment"):
        state.strategies["other"] = student  # type: ignore[index]


def test_the_strategy_in_use_cannot_be_exchanged() -> None:
    state = state_of({"teacher": DDP(), "student": DDP()}, "ddp")
    state.select_ddp_plugin("teacher")
    with pytest.raises(
        ValueError, match=r"select_ddp_plugin\('student'\).*'teacher' is in use.*state\.get_ddp_plugin\('student'\)\)"
    ):
        state.select_ddp_plugin("student")


def test_a_view_refuses_assignments_and_deletions() -> None:
    state = state_of({"ddp": DDP()})
    for name in ("mixed_precision", "something_new"):
        with pytest.raises(AttributeError, match=f"cannot assign to field '{name}'"):
            setattr(state, name, "fp16")
    with pytest.raises(AttributeError, match="cannot delete field 'device'"):
        del state.device  # type: ignore[misc]


def test_what_is_no_strategys_name_is_no_attribute() -> None:
    state = state_of({"ddp": DDP()})
    for name in ("num_process", "dpp_plugin", "zzz"):
        with pytest.raises(AttributeError, match=f"'AcceleratorState' object has no attribute '{name}'"):
            getattr(state, name)
    assert not hasattr(state, "_private")


def test_a_view_can_be_copied() -> None:
    state = state_of({"ddp": DDP()})
    assert repr(copy.copy(state)) == repr(state)


def test_partial_states_travel_in_pickles_and_are_those_of_the_process_that_loads_them(tmp_path: Path) -> None:
    state = PartialState(cpu=True)
    assert pickle.loads(pickle.dumps(state)).num_processes == 1
    for copied in (copy.copy(state), copy.deepcopy({"state": state})["state"]):
        assert copied.device == state.device
    torch.save({"state": state}, tmp_path / "arguments.bin")
    assert torch.load(tmp_path / "arguments.bin", weights_only=False)["state"].is_main_process


def test_a_state_belongs_to_an_accelerator() -> None:
    with pytest.raises(TypeError, match="missing 4 required positional arguments"):
        AcceleratorState()  # type: ignore[call-arg]


def live_in_a_world() -> dict[str, Any]:
    state = PartialState(cpu=True, timeout=SECONDS)
    assert pickle.loads(pickle.dumps(state)).process_index == state.process_index
    again = PartialState()
    found: dict[str, Any] = {
        "place": (state.process_index, state.local_process_index, state.num_processes, state.use_distributed),
        "roles": (state.is_main_process, state.is_local_main_process, state.is_last_process),
        "type": state.distributed_type,
        "backend": state.backend,
        "one world": again._world is state._world,
        "timeout": state._world.timeout,
    }
    with state.split_between_processes(["A", "B", "C"]) as part:
        found["part"] = part
    accelerator = Accelerator()
    accelerator.end_training()  # the group stays for those who live on
    again.wait_for_everyone()
    state.destroy_process_group()
    state.destroy_process_group()
    found["runs"] = dist.is_initialized()
    found["index afterwards"] = again.process_index
    with pytest.raises(WorldError, match="has ended"):
        again.wait_for_everyone()
    return found


def test_processes_live_in_one_world_without_an_accelerator() -> None:
    for rank, found in enumerate(run_ranks(live_in_a_world, 2)):
        assert found == {
            "place": (rank, rank, 2, True),
            "roles": (rank == 0, rank == 0, rank == 1),
            "type": DistributedType.MULTI_CPU,
            "backend": "gloo",
            "one world": True,
            "timeout": SECONDS,
            "part": [["A", "B"], ["C"]][rank],
            "runs": False,
            "index afterwards": rank,
        }


def adopt_a_group() -> bool:
    dist.init_process_group("gloo")
    state = PartialState(cpu=True)
    with pytest.raises(
        WorldError, match=r"was not started by accel_core.*torch\.distributed\.destroy_process_group\(\)"
    ):
        state.destroy_process_group()
    state.wait_for_everyone()
    dist.destroy_process_group()
    return state.is_main_process


def test_a_group_of_somebody_else_is_ended_by_who_started_it() -> None:
    assert run_ranks(adopt_a_group, 2) == [True, False]


def test_reading_a_strategy_by_its_older_name_looks_at_no_installed_distribution(monkeypatch):
    """Loops read it at every step."""
    state = Accelerator(cpu=True).state
    assert state.fsdp_plugin is None
    monkeypatch.setattr("accel_core.state.list_offers", lambda *_: pytest.fail("looked at what is installed"))
    assert state.fsdp_plugin is None
    assert state.distributed_type is state.distributed_type
