"""Values on their way from a device, for which another thread waits.

    there = mark(tensor.device)            # in the training's thread, which goes on at once
    host = copied_to_host(tensor, there)   # in another one

A device has its own queue of work, a *stream*. A mark is an event in it: reached when all work that
was queued before is done. Devices are found through `torch.accelerator`; one without events is
waited for where the mark is set.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch

Mark = torch.Event | None
"""None: there is nothing to wait for."""

_SHORTEST, _LONGEST = 0.0005, 0.01  # seconds between two looks at a mark


def mark(device: torch.device) -> Mark:
    """Marks the end of the work that this thread has queued on a device so far."""
    try:
        event = torch.Event(device)
        event.record(torch.accelerator.current_stream(device))
    except (RuntimeError, ValueError):  # no events, or not the accelerator of torch
        return None
    return event


def wait(for_mark: Mark) -> None:
    """Returns when a mark is reached.

    It looks now and then: the wait of an event itself would keep a processor busy, and a step of
    the training may take seconds.
    """
    pause = _SHORTEST
    while for_mark is not None and not for_mark.query():
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST)


def send(groups: Sequence[torch.Tensor], device: torch.device) -> tuple[list[torch.Tensor], Mark]:
    """Begins to copy tensors of one device to the host; what comes back is complete once the mark is reached."""
    try:
        hosts = [each.to("cpu", non_blocking=True) for each in groups]
        there = mark(device)
    except NotImplementedError:  # no pinned memory, without which such a copy waits for the device
        there = None
    if there is None:
        hosts = [each.to("cpu") for each in groups]
    return hosts, there


def copied_to_host(tensor: torch.Tensor, there: Mark) -> torch.Tensor:
    """A tensor on the host, once its mark is reached."""
    wait(there)
    if there is None:
        return tensor.to("cpu")
    # In a stream of its own: in that of the training the copy would be queued behind steps to come, and they behind it.
    with torch.Stream(device=tensor.device):
        return tensor.to("cpu")


def fetched(rows: Sequence[Sequence[Any]]) -> list[list[Any]]:
    """The cells of a table, where numbers on a device have become numbers of Python: one copy, and one wait, per device and dtype.

    Others are left as they are, also those that cannot be copied.
    """
    table = [list(row) for row in rows]
    groups: dict[tuple[torch.device, torch.dtype], list[tuple[list[Any], int]]] = {}
    for row in table:
        for column, cell in enumerate(row):
            if type(cell) is torch.Tensor and cell.numel() == 1 and not cell.is_cpu:
                groups.setdefault((cell.device, cell.dtype), []).append((row, column))
    for places in groups.values():
        with torch.no_grad(), suppress(RuntimeError):  # whoever reads the cell says why that cannot be done, and where
            numbers = torch.stack([row[column].reshape(()) for row, column in places]).to("cpu").tolist()
            for (row, column), number in zip(places, numbers, strict=True):
                row[column] = number
    return table
