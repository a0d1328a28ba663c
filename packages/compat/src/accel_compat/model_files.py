"""Weights in a file, and tensors of a model, beside what accel-big-model has."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from accel_big_model import compute_module_sizes
from accel_core import get_logger


def load_state_dict(
    checkpoint_file: str | os.PathLike[str], device_map: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The tensors of a file of safetensors, each on the device of its module, or of torch, on the CPU."""
    if Path(checkpoint_file).suffix != ".safetensors":
        state: dict[str, Any] = torch.load(checkpoint_file, map_location="cpu", weights_only=True)
        return state
    from safetensors import safe_open

    with safe_open(checkpoint_file, framework="pt") as file:  # type: ignore[no-untyped-call,unused-ignore]
        places = {name: _place(name, device_map or {}) for name in file.keys()}  # noqa: SIM118  # no mapping
        return {name: file.get_tensor(name).to("cpu" if at in (None, "disk") else at) for name, at in places.items()}


def _place(name: str, device_map: Mapping[str, Any]) -> Any:
    """The place of the innermost module of the map that has the parameter; None if there is none."""
    while name and name not in device_map:
        name = name.rpartition(".")[0]
    return device_map.get(name)


def check_tied_parameters_on_same_device(tied_params: Sequence[Sequence[str]], device_map: Mapping[str, Any]) -> None:
    """Warns of parameters that share their memory and have different places."""
    for names in tied_params:
        places = {name: _place(name, device_map) for name in names}
        if len(set(places.values())) > 1:
            get_logger(__name__).warning(
                f"Tied parameters are on different devices: {places}. Give their modules one place, or device_map='auto'."
            )


def check_device_same(first_device: Any, second_device: Any) -> bool:
    """Whether two names say one device: "cuda" is the current one."""

    def whole(device: Any) -> torch.device:
        named: Any = torch.device(device)
        if named.type in ("cpu", "meta") or named.index is not None:
            return cast("torch.device", named)
        return torch.device(named.type, torch.get_device_module(named.type).current_device())

    return whole(first_device) == whole(second_device)


def get_non_persistent_buffers(module: nn.Module, recurse: bool = False, fqns: bool = False) -> set[str]:
    """Names of buffers that are in no state dictionary; of submodules too if `recurse`, whole if `fqns`."""

    def names() -> Iterator[str]:
        for prefix, each in module.named_modules() if recurse else [("", module)]:
            yield from (f"{prefix}.{name}".lstrip(".") if fqns else name for name in each._non_persistent_buffers_set)

    return set(names())


def compute_module_total_buffer_size(module: nn.Module, **kwargs: Any) -> int:
    """Bytes of all buffers; options are those of `compute_module_sizes`."""
    return compute_module_sizes(module, buffers_only=True, **kwargs)[""]
