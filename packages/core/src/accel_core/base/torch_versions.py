"""What has another name in some version of torch from 2.9 on; nothing else asks for the version."""

from __future__ import annotations

from contextlib import suppress
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist

_OLDER_NAMES = {  # newer → older of one function with the same arguments; torch warns of the older one where both are
    "all_gather_single": "all_gather_into_tensor",
    "reduce_scatter_single": "reduce_scatter_tensor",
}
COLLECTIVES = MappingProxyType(
    {newer: newer if hasattr(dist, newer) else older for newer, older in _OLDER_NAMES.items()}
)
"""The names that collectives of `torch.distributed` have in this torch, by those of the newest."""


def all_gather_single(
    output: Any, input: Any, group: dist.ProcessGroup | None = None, async_op: bool = False
) -> dist.Work | None:
    """`torch.distributed.all_gather_single`, as whatever name it has. A collective of the group."""
    work: dist.Work | None = getattr(dist, COLLECTIVES["all_gather_single"])(
        output, input, group=group, async_op=async_op
    )
    return work


def reduce_scatter_single(
    output: Any, input: Any, op: Any = dist.ReduceOp.SUM, group: dist.ProcessGroup | None = None, async_op: bool = False
) -> dist.Work | None:
    """`torch.distributed.reduce_scatter_single`, as whatever name it has. A collective of the group."""
    name = COLLECTIVES["reduce_scatter_single"]
    work: dist.Work | None = getattr(dist, name)(output, input, op=op, group=group, async_op=async_op)
    return work


def memory_info(device: torch.device) -> tuple[int, int] | None:
    """Free and all bytes of an accelerator; None if neither torch nor the device's module knows them.

    `torch.accelerator` tells none in 2.9, and later none of allocators of a kind of their own.
    """
    of_torch = getattr(torch.accelerator, "get_memory_info", None)
    of_kind = getattr(torch.get_device_module(device), "mem_get_info", None)
    for ask in filter(None, (of_torch, of_kind)):
        with suppress(RuntimeError, NotImplementedError):
            free, total = ask(device)
            return int(free), int(total)
    return None
