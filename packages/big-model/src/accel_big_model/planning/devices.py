"""The devices of this machine, where none are given."""

from __future__ import annotations

from contextlib import suppress

import torch


def count_devices() -> int:
    """How many accelerators this machine has."""
    return torch.accelerator.device_count() if torch.accelerator.is_available() else 0


def memory_of_smallest() -> int | None:
    """Bytes of the accelerator with the least memory, used or not; None if nobody knows."""
    found = []
    for index in range(count_devices()):
        for ask in (torch.accelerator.get_memory_info, getattr(torch.get_device_module(), "mem_get_info", None)):
            with suppress(RuntimeError, NotImplementedError):
                if ask is not None:
                    found.append(int(ask(index)[1]))
                    break
    return min(found, default=None)
