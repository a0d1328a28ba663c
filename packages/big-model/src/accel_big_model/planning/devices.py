"""The devices of this machine, where none are given."""

from __future__ import annotations

import torch

from accel_core.api.component import memory_info


def count_devices() -> int:
    """How many accelerators this machine has."""
    return torch.accelerator.device_count() if torch.accelerator.is_available() else 0


def memory_of_smallest() -> int | None:
    """Bytes of the accelerator with the least memory, used or not; None if nobody knows."""
    kind = torch.accelerator.current_accelerator()
    found = [memory_info(torch.device(kind.type, index)) for index in range(count_devices())] if kind else []
    return min((total for _, total in filter(None, found)), default=None)
