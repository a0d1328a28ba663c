"""torch's process groups: the default one and those made beside it, with their backends and timeouts."""

from __future__ import annotations

import weakref
from datetime import timedelta

import torch
import torch.distributed as dist

from accel_core.base.errors import WorldError

Beside = dict[tuple[tuple[int, ...], str], dist.ProcessGroup]
"""Process groups by their ranks and their purpose, which is empty for subgroups."""

# By default group. One that somebody else started outlives its World, and so do the groups that were made beside it.
_beside: weakref.WeakKeyDictionary[dist.ProcessGroup, Beside] = weakref.WeakKeyDictionary()


def default_group() -> dist.ProcessGroup | None:
    """torch's default process group; None while there is none."""
    return dist.group.WORLD if dist.is_initialized() else None


def default_backend(device: torch.device) -> str:
    """gloo, and beside it the device's backend: data on the CPU can then travel as they are."""
    return "gloo" if device.type == "cpu" else f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device)}"


def timeouts(group: dist.ProcessGroup) -> list[timedelta]:
    """The timeout of each backend of `group`, as the backend tells it; nothing if it does not."""
    backends = [group._get_backend(device) for device in group._device_types]
    return [options._timeout for backend in backends if (options := getattr(backend, "options", None)) is not None]


def check_timeouts(group: dist.ProcessGroup, asked: timedelta | None) -> None:
    """Raises `WorldError` if a group gives up after another time than was asked for."""
    found = timeouts(group)
    if asked is not None and any(timeout != asked for timeout in found):
        raise WorldError(
            f"timeout={asked} was asked for, but torch made a process group with {', '.join(map(str, found))}. Leave "
            f"timeout= out, or choose another backend= that honours it."
        )


def made_beside(group: dist.ProcessGroup) -> Beside:
    """The groups that were made beside this default group, to look up and to add to."""
    return _beside.setdefault(group, {})


def groups_beside(group: dist.ProcessGroup) -> list[dist.ProcessGroup]:
    """This rank's process groups that were made beside this default group, but for subgroups."""
    return [each for (_, purpose), each in made_beside(group).items() if purpose]
