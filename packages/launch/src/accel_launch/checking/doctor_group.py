"""Whether the ranks can talk as they do in training: they meet, compute a sum, and each pair sends both ways."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from accel_core import PartialState
from accel_launch.checking.doctor_facts import device_of

_TIMES = 5


def try_group(note: Callable[[str], None]) -> dict[str, Any]:
    """Meets the others, and tries the default group. A collective.

    Args:
        note: is told what comes next, so that a rank that is stuck is known to be stuck there.

    Returns:
        The device, the seconds that meeting took, what the sum was and had to be, and for each
        other rank the ms of a message.
    """
    note("meeting the others")
    start = time.perf_counter()
    state = PartialState()
    met = time.perf_counter() - start
    size, rank, device = state.num_processes, state.process_index, state.device
    found: dict[str, Any] = {"device": device_of(device), "met": met, "pairs": {}}
    if size == 1:
        return found
    note("a sum over all ranks")
    start = time.perf_counter()
    total = torch.full((1024,), float(rank + 1), device=device)
    dist.all_reduce(total)
    found |= {"sum": total[-1].item(), "expected": size * (size + 1) / 2, "took": time.perf_counter() - start}
    for partner in partners(rank, size):
        note(f"sending and receiving between ranks {min(rank, partner)} and {max(rank, partner)}")
        found["pairs"][partner] = _exchange(partner, rank < partner, device) * 1000
    note("the end")
    dist.barrier()
    return found


def partners(rank: int, size: int) -> Iterator[int]:
    """The other ranks, in an order in which at each time every rank has a partner that has it: a tournament."""
    seats = size + size % 2
    for turn in range(seats - 1):
        if rank == seats - 1:
            partner = turn * (seats // 2) % (seats - 1)
        else:
            partner = (turn - rank) % (seats - 1)
            partner = seats - 1 if partner == rank else partner
        if partner < size:
            yield partner


def _exchange(partner: int, first: bool, device: torch.device) -> float:
    """Seconds that a small message takes, one way: the best of a few that go there and back."""
    message = torch.zeros(1, device=device)
    best = float("inf")
    for _ in range(_TIMES):
        start = time.perf_counter()
        if first:
            dist.send(message, partner)
            dist.recv(message, partner)
        else:
            dist.recv(message, partner)
            dist.send(message, partner)
        message.item()  # where the device computes on its own, this waits for it
        best = min(best, (time.perf_counter() - start) / 2)
    return best
