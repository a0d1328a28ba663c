"""Each process takes the device that is meant for it; where the machine has one that torch does not find, it is said."""

from __future__ import annotations

import importlib.util
import os
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from accel_core import Accelerator, PartialState, World, gather
from accel_core.base.errors import WorldError
from accel_core.processes import rendezvous
from accel_core.processes.launch_environment import Place
from accel_core.processes.rendezvous import acquire


def place(local_rank: int, local_size: int, source: str = "torchrun") -> Place:
    return Place(source, local_rank, local_size, local_rank, local_size)


@pytest.fixture(autouse=True)
def nothing_is_said_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if "_VISIBLE_" in name or name in ("RANK", "WORLD_SIZE", "ACCELERATE_USE_CPU"):
            monkeypatch.delenv(name)


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A machine with two accelerators. Gives the indices that were made current."""
    indices: list[int] = []
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(torch.accelerator, "set_device_index", indices.append)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=f"GPU-{device.index}"))
    return indices


def test_device_has_the_index_of_the_local_rank(chosen: list[int]) -> None:
    assert acquire(place(1, 2), cpu=False) == torch.device("cuda", 1)
    assert chosen == [1]


def test_cpu_leaves_the_accelerator_alone(chosen: list[int]) -> None:
    assert acquire(place(1, 2), cpu=True) == torch.device("cpu")
    assert chosen == []


def test_more_local_ranks_than_devices_is_an_error(chosen: list[int]) -> None:
    with pytest.raises(
        WorldError, match=r"3 processes run on this machine.*this process sees 2.*Accelerator\(cpu=True\)"
    ):
        acquire(place(0, 3), cpu=False)


def test_process_that_sees_one_device_of_several_takes_it(chosen: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """A scheduler that binds one device to each task. Which one it is, the ranks compare when they meet."""
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    assert acquire(place(3, 4), cpu=False) == torch.device("cuda", 0)
    assert chosen == [0]


@pytest.fixture
def one_without_identity(chosen: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that sees one device, of which torch tells neither a uuid nor a place on the bus."""
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace())


@pytest.mark.usefixtures("one_without_identity")
@pytest.mark.parametrize(("source", "variable"), [("slurm", None), ("mpi", None), ("torchrun", "X_VISIBLE_DEVICES")])
def test_device_that_was_bound_and_cannot_be_told_from_others_is_taken_with_a_warning(
    chosen: list[int], monkeypatch: pytest.MonkeyPatch, source: str, variable: str | None
) -> None:
    if variable is not None:
        monkeypatch.setenv(variable, "3")
    with pytest.warns(UserWarning, match=r"4 processes.*sees 1 \(cuda\), and torch cannot tell.*one process for each"):
        assert acquire(place(3, 4, source), cpu=False) == torch.device("cuda", 0)
    assert chosen == [0]


@pytest.mark.usefixtures("one_without_identity")
def test_device_that_nobody_bound_and_that_cannot_be_told_from_others_is_an_error(chosen: list[int]) -> None:
    with pytest.raises(WorldError, match=r"4 processes run on this machine.*this process sees 1"):
        acquire(place(3, 4), cpu=False)
    assert chosen == []


# No accelerator is found -----------------------------------------------------------------------------------------------------


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine on which torch finds no accelerator, as a folder that stands for its root."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: None)
    monkeypatch.setattr(rendezvous, "Path", lambda path: tmp_path / str(path).lstrip("/"))
    (tmp_path / "dev").mkdir()
    return tmp_path


@pytest.mark.usefixtures("machine")
def test_machine_without_an_accelerator_computes_on_its_cpu_in_silence() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert acquire(place(0, 1), cpu=False) == torch.device("cpu")


@pytest.mark.parametrize("mark", ["torch_xla", "/dev/accel0"])
def test_machine_for_a_tpu_is_an_error_and_computes_on_its_cpu_if_asked_to(
    machine: Path, monkeypatch: pytest.MonkeyPatch, mark: str
) -> None:
    find_spec = importlib.util.find_spec
    if mark == "torch_xla":
        found: Any = lambda name: object() if name == mark else find_spec(name)
        monkeypatch.setattr(importlib.util, "find_spec", found)
    else:
        (machine / "dev" / "accel0").touch()
    with pytest.raises(
        WorldError, match=f"has {mark}. strategy='xla' trains there. .*pip install .*accel-xla.*cpu=True"
    ):
        Accelerator()
    accelerator = Accelerator(cpu=True)
    assert accelerator.device == torch.device("cpu")
    assert gather(torch.ones(1)).tolist() == [1.0]  # of the module, which is told nothing of a CPU
    monkeypatch.setenv("ACCELERATE_USE_CPU", "1")
    assert Accelerator().device == torch.device("cpu")


@pytest.mark.parametrize(("build", "file"), [("cuda", "nvidia0"), ("hip", "kfd")])
def test_driver_that_fails_is_a_warning_that_says_what_to_look_at(
    machine: Path, monkeypatch: pytest.MonkeyPatch, build: str, file: str
) -> None:
    monkeypatch.setattr(torch.version, build, "99.1", raising=False)
    (machine / "dev" / file).touch()
    look = {"cuda": "nvidia-smi", "hip": "rocminfo"}[build]
    said = rf"finds no accelerator, and this machine has /dev/{file}.*`{look}`.*Accelerator\(cpu=True\)"
    with pytest.warns(UserWarning, match=said) as caught:
        assert Accelerator().device == torch.device("cpu")
    assert [warning.filename for warning in caught] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Accelerator(cpu=True)
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")  # who hides devices knows why there is none
        Accelerator()


def test_driver_of_another_build_is_nothing_to_warn_of(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with AMD's graphics in its processor has this file, whatever torch is built for."""
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", None)
    (machine / "dev" / "kfd").touch()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert acquire(place(0, 1), cpu=False) == torch.device("cpu")


class WithoutFloat64(torch.Tensor):
    """A tensor whose device has no float64, as MPS has none."""

    def to(self, *_: Any, **__: Any) -> torch.Tensor:
        raise TypeError("Cannot convert a MPS Tensor to float64 dtype. Please use float32 instead.")


def test_a_dtype_that_the_device_lacks_is_torchs_own_error() -> None:
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(torch.utils.data.DataLoader([torch.ones(1).double()], collate_fn=_on_a_device_without))
    with pytest.raises(
        TypeError, match=r"^Cannot convert a MPS Tensor to float64 dtype\. Please use float32 instead\.$"
    ):
        next(iter(loader))


def _on_a_device_without(samples: list[torch.Tensor]) -> torch.Tensor:
    return samples[0].as_subclass(WithoutFloat64)


# cpu=True --------------------------------------------------------------------------------------------------------------------


def test_what_is_called_beside_an_accelerator_on_the_cpu_computes_there_too(chosen: list[int]) -> None:
    accelerator = Accelerator(cpu=True)
    assert World.current().device == PartialState().device == accelerator.device == torch.device("cpu")
    assert chosen == []
    assert World.current(cpu=False).device == torch.device("cuda", 0)


def test_what_is_called_after_the_last_accelerator_chooses_anew(chosen: list[int]) -> None:
    accelerator = Accelerator(cpu=True)
    del accelerator
    assert World.current().device == torch.device("cuda", 0)
