"""The environment of the process, and what the machine says of itself before torch is asked."""

from __future__ import annotations

import functools
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.torch_version import TorchVersion

from accel_compat import availability
from accel_compat.plugins.handlers import without_environment as clear_environment
from accel_compat.plugins.variables import flag, str_to_bool

_logger = logging.getLogger("accelerate.utils.environment")  # as scripts know it
Decorated = TypeVar("Decorated", bound=Callable[..., Any])

__all__ = [
    "CPUInformation", "are_libraries_initialized", "check_cuda_fp8_capability", "check_cuda_p2p_ib_support",
    "clear_environment", "convert_dict_to_env_variables", "get_cpu_distributed_information", "get_current_device_type",
    "get_driver_version", "get_gpu_info", "get_int_from_env", "override_numa_affinity", "parse_choice_from_env",
    "parse_flag_from_env", "patch_environment", "purge_accelerate_environment", "set_numa_affinity", "str_to_bool",
]  # fmt: skip


def parse_flag_from_env(key: str, default: bool = False) -> bool:
    """The truth value of a variable, or `default`."""
    return flag(os.environ.get(key, str(default)))


def parse_choice_from_env(key: str, default: str = "no") -> str:
    """The text of a variable, or `default`."""
    return os.environ.get(key, str(default))


def get_int_from_env(env_keys: Iterable[str], default: int) -> int:
    """The first variable that is set to a number of at least 0, or `default`."""
    numbers = (int(os.environ.get(key, "-1")) for key in env_keys)
    return next((number for number in numbers if number >= 0), default)


def are_libraries_initialized(*library_names: str) -> list[str]:
    """Those of the modules that were imported."""
    return [name for name in library_names if name in sys.modules]


def convert_dict_to_env_variables(current_env: Mapping[str, str]) -> list[str]:
    """Lines `NAME=value` of a file of variables; what would not stay one line of it is left out, with a warning."""

    def fits(name: str, value: str) -> bool:
        return bool(name and value) and not any(character in name + value for character in ";\n<> ")

    for name, value in current_env.items():
        if not fits(name, value):
            _logger.warning(f"Skipping {name}={value} as it contains forbidden characters or missing values.")
    return [f"{name}={value}\n" for name, value in current_env.items() if fits(name, value)]


@contextmanager
def patch_environment(**kwargs: object) -> Iterator[None]:
    """Sets variables, with names in upper case, for the block."""
    values = {name.upper(): str(value) for name, value in kwargs.items()}
    before = {name: os.environ[name] for name in values if name in os.environ}
    os.environ.update(values)
    try:
        yield
    finally:
        for name in values:
            os.environ.pop(name, None)
        os.environ.update(before)


def purge_accelerate_environment(func_or_cls: Decorated) -> Decorated:
    """A function, or a class of tests and its subclasses, that leaves variables `ACCELERATE_…` as they were."""

    def own() -> dict[str, str]:
        return {name: value for name, value in os.environ.items() if name.startswith("ACCELERATE_")}

    def of_function(function: Any) -> Any:
        @functools.wraps(function)
        def restoring(*args: Any, **kwargs: Any) -> Any:
            before = own()
            try:
                return function(*args, **kwargs)
            finally:
                for name in own():
                    del os.environ[name]
                os.environ.update(before)

        restoring._restores = True  # type: ignore[attr-defined]  # a subclass does not wrap it again
        return restoring

    def of_class(kind: Any) -> Any:
        for name in dir(kind):
            method = getattr(kind, name)
            if name.startswith("test") and callable(method) and not hasattr(method, "_restores"):
                setattr(kind, name, of_function(method))
        return kind

    if not isinstance(func_or_cls, type):
        decorated: Decorated = of_function(func_or_cls)
        return decorated
    of_class(func_or_cls)
    of_subclass: Any = classmethod(lambda cls, **_: of_class(cls))
    setattr(func_or_cls, "__init_subclass__", of_subclass)  # noqa: B010  # mypy takes it for a method
    return func_or_cls


def get_current_device_type() -> tuple[str, str]:
    """The type of accelerator, and the word for several processes on it; none is initialised. "cuda" if there is none."""
    kinds = ("mlu", "sdaa", "musa", "npu", "hpu", "xpu", "neuron")
    found = next((kind for kind in kinds if getattr(availability, f"is_{kind}_available")()), None)
    return ("cuda", "MULTI_GPU") if found is None else (found, f"MULTI_{found.upper()}")


def _ask_nvidia(*fields: str) -> list[list[str]]:
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader"]
    return [
        [cell.strip() for cell in line.split(",")] for line in subprocess.check_output(command, text=True).splitlines()
    ]


def get_gpu_info() -> tuple[list[str], int]:
    """Names and number of NVIDIA's devices, by `nvidia-smi`."""
    names = [row[0] for row in _ask_nvidia("name")]
    return names, len(names)


def get_driver_version() -> str:
    """The version of NVIDIA's driver, by `nvidia-smi`."""
    return _ask_nvidia("driver_version")[0][0]


def check_cuda_p2p_ib_support() -> bool:
    """False if consumer devices of this machine cannot copy among each other: RTX 40 with an older driver."""
    try:
        names, count = get_gpu_info()
        affected = count > 1 and any("RTX 40" in name for name in names)
        return not affected or bool(TorchVersion(get_driver_version()) >= "550.40.07")
    except (OSError, subprocess.CalledProcessError, IndexError):
        return True  # no such devices


@functools.cache
def check_cuda_fp8_capability() -> bool:
    """Whether the first device of NVIDIA's computes in fp8."""
    try:
        major, _, minor = _ask_nvidia("compute_cap")[0][0].partition(".")
        capability = (int(major), int(minor))
    except (OSError, subprocess.CalledProcessError, IndexError, ValueError):
        capability = torch.cuda.get_device_capability()
    return capability >= (8, 9)


@dataclass
class CPUInformation:
    """Ranks and numbers of processes, of the world and of this machine."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1


def get_cpu_distributed_information() -> CPUInformation:
    """What torchrun, Intel MPI, Open MPI or MVAPICH say of this process."""
    mpi = "OMPI_COMM_WORLD_{0}", "MV2_COMM_WORLD_{0}"

    def ask(default: int, *names: str, of_mpi: str) -> int:
        return get_int_from_env([*names, *(name.format(of_mpi) for name in mpi)], default)

    return CPUInformation(
        rank=ask(0, "RANK", "PMI_RANK", of_mpi="RANK"),
        world_size=ask(1, "WORLD_SIZE", "PMI_SIZE", of_mpi="SIZE"),
        local_rank=ask(0, "LOCAL_RANK", "MPI_LOCALRANKID", of_mpi="LOCAL_RANK"),
        local_world_size=ask(1, "LOCAL_WORLD_SIZE", "MPI_LOCALNRANKS", of_mpi="LOCAL_SIZE"),
    )


def override_numa_affinity(local_process_index: int, verbose: bool | None = None) -> None:
    """Binds the process to the cores beside its device, if Linux says which; without a device it does nothing."""
    if not torch.cuda.is_available():
        return
    device: Any = torch.cuda.get_device_properties(local_process_index)
    name = f"{device.pci_domain_id:04x}:{device.pci_bus_id:02x}:{device.pci_device_id:02x}.0"
    listed = Path(f"/sys/bus/pci/devices/{name}/local_cpulist").read_text(encoding="ascii").strip()
    ranges = [part.partition("-") for part in listed.split(",") if part]
    cores = {core for first, _, last in ranges for core in range(int(first), int(last or first) + 1)}
    os.sched_setaffinity(0, cores & os.sched_getaffinity(0))
    if parse_flag_from_env("ACCELERATE_DEBUG_MODE") if verbose is None else verbose:
        _logger.info(f"Process {local_process_index} computes on the cores {sorted(os.sched_getaffinity(0))}.")


@functools.cache
def set_numa_affinity(local_process_index: int, verbose: bool | None = None) -> None:
    """The same, once for each device."""
    override_numa_affinity(local_process_index, verbose)
