"""Offloading of optimizer state and parameters: the configuration's devices and folders."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

DEVICES = ("none", "cpu", "nvme")

_OF_FILES: Mapping[str, object] = MappingProxyType(
    {
        "buffer_count": 4,
        "pipeline_read": False,
        "pipeline_write": False,
        "fast_init": False,
        "super_offload": False,
        "cpuadam_cores_perc": 0.8,
    }
)
"""How DeepSpeed offloads optimizer state, by its own defaults: what nothing reads where state is kept in mapped files."""

Devices = Mapping[str, str]
"""By section, `offload_optimizer` and `offload_param`, one of `DEVICES`."""


def settle_offload(
    zero: dict[str, Any], stage: int, asked: Mapping[str, str | None], folder: str | Path | None, source: str
) -> Devices:
    """Completes the sections of what is offloaded, in place, and gives the device of each.

    Args:
        zero: the section `zero_optimization`.
        stage: the stage of ZeRO.
        asked: the arguments of the strategy, by section.
        folder: `offload_folder`.
        source: how messages call the configuration.

    Raises:
        ValueError: the two sources contradict each other, or DeepSpeed would ignore what is asked.
    """
    devices = {name: _settle_device(zero, name, device, source) for name, device in asked.items()}
    for name, device in devices.items():
        _check_stage(name, device, stage)
        section = zero.get(name, {})
        if device == "none":
            zero.pop(name, None)
        elif device == "nvme":
            _check_own_files(name, section, source)
            section["nvme_path"] = str(_settle_folder(section.get("nvme_path"), folder, name, source))
        else:
            section.pop("nvme_path", None)
    if folder is not None and "nvme" not in devices.values():
        raise ValueError(
            f"offload_folder={str(folder)!r} was given, but nothing is offloaded to NVMe: {_said(devices)}. Write "
            f"offload_optimizer='nvme' or offload_param='nvme' with zero_stage=3, or leave offload_folder out."
        )
    return devices


def check_folders(zero: Mapping[str, Any]) -> None:
    """Raises unless this process can write where parts are offloaded to.

    Raises:
        ValueError: a folder cannot be made, or not be written into.
    """
    for name in ("offload_optimizer", "offload_param"):
        path = zero.get(name, {}).get("nvme_path")
        if path is None:
            continue
        nearest = Path(path).absolute()
        while not nearest.exists():
            nearest = nearest.parent
        if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
            found = "is not writable" if nearest.is_dir() else "is not a folder"
            raise ValueError(
                f"{name!r} is to be kept in {path!r}, but {str(nearest)!r} {found} on this machine. Give a folder on a fast "
                f"disk in which this process may write: offload_folder='...'."
            )


def keep_state_here(zero: dict[str, Any]) -> None:
    """Has DeepSpeed offload optimizer state to the host, whose memory `StateFiles` makes files."""
    section = zero.get("offload_optimizer", {})
    if section.get("device") == "nvme":
        kept = {name: section[name] for name in ("pin_memory", "ratio") if name in section}
        zero["offload_optimizer"] = {**kept, "device": "cpu"}


def check_files(device_of_parameters: str, stays: str) -> None:
    """Raises for parameters that would be in files alone, and are read and written in memory here.

    Args:
        device_of_parameters: where parameters are kept.
        stays: which of them have no masters yet, or never; empty: none.

    Raises:
        ValueError: with what to write instead.
    """
    if device_of_parameters == "nvme" and stays:
        raise ValueError(
            f"offload_param to 'nvme' was asked for with {stays}, which would be in files alone, and are saved and loaded in memory here. "
            f"Write offload_param='cpu'."
        )


def _settle_device(zero: dict[str, Any], name: str, asked: str | None, source: str) -> str:
    if asked is not None and asked not in DEVICES:
        raise ValueError(f"{name}={asked!r} was given; known are {', '.join(map(repr, DEVICES))}.")
    section = zero.get(name) or {}
    found = section.get("device", "none")
    if found == "auto" or name not in zero:
        found = asked or "none"
    if found not in DEVICES:
        raise ValueError(
            f"{source} has 'zero_optimization.{name}.device' with {found!r}; known are {', '.join(map(repr, DEVICES))}."
        )
    if asked is not None and asked != found:
        raise ValueError(
            f"{name}={asked!r} was given, but {source} has 'zero_optimization.{name}.device' with {found!r}. Keep one of them."
        )
    zero[name] = {**section, "device": found}
    return str(found)


def _check_stage(name: str, device: str, stage: int) -> None:
    least = 3 if name == "offload_param" or device == "nvme" else 1
    if device != "none" and stage < least:
        raise ValueError(
            f"{name} to {device!r} was asked for with ZeRO stage {stage}, where DeepSpeed would not do it. It takes "
            f"zero_stage={least}{' or higher' if least < 3 else ''}; or leave {name} out."
        )


def _check_own_files(name: str, section: Mapping[str, Any], source: str) -> None:
    changed = [key for key, own in _OF_FILES.items() if section.get(key, own) not in (own, "auto")]
    if name == "offload_optimizer" and changed:
        raise ValueError(
            f"{source} has 'zero_optimization.offload_optimizer' with {', '.join(f'{key} {section[key]}' for key in changed)}, which "
            f"DeepSpeed's own offloading reads, but to 'nvme' optimizer state goes in memory-mapped files, which the system reads and "
            f"writes by itself. Take {'it' if len(changed) == 1 else 'them'} out."
        )


def _settle_folder(found: object, folder: str | Path | None, name: str, source: str) -> object:
    if found is None or found == "auto":
        found = folder
    if found is None:
        raise ValueError(
            f"{name} to 'nvme' was asked for without a folder. Write offload_folder='/local_nvme', or 'nvme_path' in the "
            f"section 'zero_optimization.{name}'."
        )
    if folder is not None and Path(str(found)) != Path(folder):
        raise ValueError(
            f"offload_folder={str(folder)!r} was given, but {source} has 'zero_optimization.{name}.nvme_path' with {found!r}. "
            f"Keep one of them."
        )
    return found


def _said(devices: Devices) -> str:
    return ", ".join(f"{name} to {device!r}" for name, device in devices.items())
