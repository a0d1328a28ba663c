"""Memory for a model in each place: accelerators, main memory, and the disk, with enough."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import torch
from torch import nn

from accel_big_model.sizes import compute_module_sizes, convert_file_size_to_int
from accel_core.api.component import memory_info

Place: TypeAlias = int | str
"""A key of device maps and limits: the index of an accelerator, "cpu", "disk", or a device's name."""

HEAD_ROOM = 0.9
"""The part of an accelerator's free memory that a model may take; the rest is for what it computes."""


def get_max_memory(max_memory: Mapping[Place, int | str] | None = None) -> dict[Place, int]:
    """Bytes that a model may take in each place: accelerators by index, then main memory.

    `max_memory`: limits in bytes or as text such as "10GiB"; places that it leaves out get nothing.
    None: nine tenths of what each accelerator has free, and what the system says is available.
    Raises `ValueError` for a limit that is no size, or a place that is not here.
    """
    if max_memory is None:
        found: dict[Place, int] = {}
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        shared = False
        for index in range(torch.accelerator.device_count() if accelerator else 0):
            free = _free_on(index)
            shared = shared or free is None
            if free is not None:
                found[index] = int(free * HEAD_ROOM)
        if shared and accelerator is not None:  # an accelerator that computes in main memory has no other
            return {accelerator.type: int(available_memory() * HEAD_ROOM)}
        return found | {"cpu": available_memory()}
    limits = {place: convert_file_size_to_int(limit) for place, limit in max_memory.items()}
    for place in limits:
        check_place(place, "max_memory has a limit")
    devices = sorted(place for place in limits if isinstance(place, int))
    known = torch.accelerator.device_count()
    if absent := [index for index in devices if known and index >= known]:
        raise ValueError(f"max_memory has limits for accelerators {absent}, and there are {known}: leave them out.")
    ordered: list[Place] = [
        *devices,
        *(place for place in limits if not isinstance(place, int) and place not in ("cpu", "disk")),
    ]
    return {place: limits[place] for place in [*ordered, *(each for each in ("cpu", "disk") if each in limits)]}


def check_place(place: Place | torch.device, what: str) -> None:
    """Raises `ValueError` for what is no place of weights: "meta", or a device that torch does not know."""
    try:
        is_place = isinstance(place, int) or place == "disk" or torch.device(place).type != "meta"
    except (RuntimeError, TypeError):
        is_place = False
    if not is_place:
        raise ValueError(
            f"{what} on {str(place)!r}, which is no place for weights. Places are numbers of accelerators, 'cpu', 'disk', and names "
            f"of devices such as 'cuda:0'."
        )


def available_memory() -> int:
    """Bytes of main memory available to this process, within the limits of its control groups and of its own."""
    available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():  # which counts the cache too, that gives way
        lines = dict(line.split(":", 1) for line in meminfo.read_text(encoding="ascii").splitlines())
        available = int(lines["MemAvailable"].split()[0]) * 1024
    return max(0, min([available, *_left_in_groups(), *_left_of_own()]))


def _left_in_groups() -> Iterator[int]:
    """What each control group of this process that limits memory has left: its own, and those around it."""
    groups = Path("/proc/self/cgroup")
    lines = groups.read_text(encoding="utf-8", errors="replace").splitlines() if groups.exists() else []
    for kinds, path in [line.split(":", 2)[1:] for line in lines if line.count(":") > 1]:
        if kinds and "memory" not in kinds.split(","):
            continue
        root = Path("/sys/fs/cgroup/memory" if kinds else "/sys/fs/cgroup")
        own = root / path.lstrip("/")
        for folder in [each for each in (own, *own.parents) if each.is_relative_to(root)]:
            # The root limits nothing, and a container may not see the groups around its own.
            with contextlib.suppress(OSError, ValueError):
                yield _left_in_group(folder, *(_VERSION_1 if kinds else _VERSION_2))


_VERSION_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_VERSION_2 = ("memory.max", "memory.current", "inactive_file")


def _left_in_group(folder: Path, limit: str, used: str, cache: str) -> int:
    """Bytes that a group has left; cached files give way. `OSError` or `ValueError` if it has no limit."""
    allowed = int((folder / limit).read_text(encoding="ascii"))  # "max" is none
    taken = int((folder / used).read_text(encoding="ascii"))
    details = (folder / "memory.stat").read_text(encoding="ascii").split() if (folder / "memory.stat").exists() else []
    given_way = dict(zip(details[::2], details[1::2], strict=False)).get(cache, 0)
    return allowed - taken + int(given_way)


def _left_of_own() -> Iterator[int]:
    """What the limit of this process's addresses (`ulimit -v`) leaves."""
    try:
        import resource  # which Windows lacks
    except ImportError:
        return
    allowed, _ = resource.getrlimit(resource.RLIMIT_AS)
    status = Path("/proc/self/statm")
    if allowed != resource.RLIM_INFINITY and status.exists():
        yield allowed - int(status.read_text(encoding="ascii").split()[0]) * os.sysconf("SC_PAGE_SIZE")


def _free_on(index: int) -> int | None:
    """Free bytes of an accelerator; None for one without memory of its own."""
    kind = torch.accelerator.current_accelerator()
    found = None if kind is None else memory_info(torch.device(kind.type, index))
    return None if found is None else found[0]


def get_balanced_memory(
    model: nn.Module,
    max_memory: Mapping[Place, int | str] | None = None,
    no_split_module_classes: Sequence[str] | str | None = None,
    dtype: torch.dtype | str | None = None,
    special_dtypes: Mapping[str, torch.dtype | str] | None = None,
    low_zero: bool = False,
) -> dict[Place, int]:
    """Limits by which all accelerators get equally much of a model, for `infer_auto_device_map`.

    The last accelerator keeps its whole limit, for parts are never equally large. `low_zero`: the
    first one gets as little as possible, where `generate` needs it for other things.
    """
    limits = get_max_memory(max_memory)
    devices = [place for place, limit in limits.items() if place not in ("cpu", "disk") and limit > 0]
    if len(devices) < 2:
        return limits
    sizes = compute_module_sizes(model, dtype, special_dtypes)
    no_split = [no_split_module_classes] if isinstance(no_split_module_classes, str) else no_split_module_classes or ()
    share = sizes.get("", 0) // (len(devices) - 1 if low_zero else len(devices))
    share += int(1.25 * max(_mean_leaf(model, sizes), _largest_block(model, sizes, no_split)))
    for device in devices[1 if low_zero else 0 : -1]:
        limits[device] = min(limits[device], share)
    if low_zero:
        beyond = sizes.get("", 0) - sum(limits[device] for device in devices[1:])
        limits[devices[0]] = min(limits[devices[0]], max(0, beyond))
    return limits


def _mean_leaf(model: nn.Module, sizes: Mapping[str, int]) -> int:
    leaves = [sizes[name] for name, module in model.named_modules() if name in sizes and not list(module.children())]
    return sum(leaves) // max(len(leaves), 1)


def _largest_block(model: nn.Module, sizes: Mapping[str, int], no_split: Sequence[str]) -> int:
    blocks = (sizes.get(name, 0) for name, module in model.named_modules() if type(module).__name__ in no_split)
    return max(blocks, default=0)
