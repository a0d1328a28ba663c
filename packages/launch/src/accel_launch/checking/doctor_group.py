"""Whether the ranks can talk as they do in training: they meet, and compute a sum."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from accel_core import PartialState
from accel_launch.checking.doctor_facts import device_of


def try_group(note: Callable[[str], None]) -> dict[str, Any]:
    """Meets the others, and tries the default group: device, seconds that meeting took, what the sum was and had to be. A collective.

    `note` is told what comes next, so that a rank that is stuck is known to be stuck there.
    """
    note("meeting the others")
    start = time.perf_counter()
    state = PartialState()
    met = time.perf_counter() - start
    size, rank, device = state.num_processes, state.process_index, state.device
    found: dict[str, Any] = {"device": device_of(device), "met": met}
    if size == 1:
        return found
    note("a sum over all ranks")
    start = time.perf_counter()
    total = torch.full((1024,), float(rank + 1), device=device)
    dist.all_reduce(total)
    found |= {"sum": total[-1].item(), "expected": size * (size + 1) / 2, "took": time.perf_counter() - start}
    note("the end")
    dist.barrier()
    return found
