"""Functions without a subject in common."""

from __future__ import annotations

import functools
import platform
import socket
from collections import defaultdict
from typing import Any

import torch
from torch.torch_version import TorchVersion

from accel_core import get_logger

_OLDEST_KERNEL = "5.5.0"


def get_pretty_name(obj: Any) -> str:
    """The qualified name of an object, else of its class."""
    for each in (obj, type(obj)):
        for attribute in ("__qualname__", "__name__"):
            if hasattr(each, attribute):
                return str(getattr(each, attribute))
    return str(obj)


def merge_dicts(source: dict[Any, Any], destination: dict[Any, Any]) -> dict[Any, Any]:
    """Puts what is in `source` into `destination`, dictionaries in it too, and gives that."""
    for key, value in source.items():
        destination[key] = merge_dicts(value, destination.setdefault(key, {})) if isinstance(value, dict) else value
    return destination


def recursive_getattr(obj: Any, attr: str) -> Any:
    """An attribute of an attribute: "layer.weight"."""
    return functools.reduce(getattr, attr.split("."), obj)


def is_port_in_use(port: int | None = None) -> bool:
    """Whether something answers at a port of this machine."""
    with socket.socket() as connection:
        return connection.connect_ex(("localhost", 29500 if port is None else port)) == 0


def get_free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as connection:
        connection.bind(("", 0))
        return int(connection.getsockname()[1])


def convert_bytes(size: float) -> str:
    """A size in the largest unit that fits: "1.5 KB"."""
    units = ("bytes", "KB", "MB", "GB", "TB", "PB")
    power = next((power for power in range(len(units)) if size < 1024 ** (power + 1)), len(units) - 1)
    return f"{round(size / 1024**power, 2)} {units[power]}"


def check_os_kernel() -> None:
    """Warns of a kernel of Linux under which processes may hang."""
    system = platform.uname()
    found = system.release.partition("-")[0]
    if system.system == "Linux" and TorchVersion(found) < _OLDEST_KERNEL:
        get_logger(__name__).warning(
            f"Detected kernel version {found}, which is below the recommended minimum of {_OLDEST_KERNEL}; processes may hang.",
            main_process_only=True,
        )


def id_tensor_storage(tensor: torch.Tensor) -> tuple[torch.device, int, int]:
    """What is equal for tensors that share their memory: device, address and size of the storage."""
    storage = tensor.untyped_storage()
    return tensor.device, storage.data_ptr(), storage.nbytes()


def clean_state_dict_for_safetensors(state_dict: dict[str, Any]) -> dict[str, Any]:
    """One name for each memory, which is what a file of safetensors holds; the others are left out, with a warning."""
    names = defaultdict(list)
    for name, tensor in state_dict.items():
        if isinstance(tensor, torch.Tensor) and tensor.device.type != "meta":
            names[id_tensor_storage(tensor)].append(name)
    left_out = {name for same in names.values() for name in same[1:]}
    if left_out:
        get_logger(__name__).warning(
            f"Removed shared tensor {left_out} while saving. Check that loading says nothing about missing names."
        )
    kept = {name: tensor for name, tensor in state_dict.items() if name not in left_out}
    return {name: tensor.contiguous() if isinstance(tensor, torch.Tensor) else tensor for name, tensor in kept.items()}
