"""A tensor on its way from a device to the host, for which another thread waits."""

from __future__ import annotations

import time

import torch

_SHORTEST, _LONGEST = 0.0005, 0.01  # seconds between two looks at an event


class HostCopy:
    """A copy of a tensor as it is now. Making one waits for no device that has events and pinned memory.

    Args:
        tensor: here as a whole (see `scalars.local`).
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self.elements = tensor.numel()
        self._event: torch.Event | None = None
        with torch.no_grad():
            if tensor.is_cpu:
                self._host = tensor.clone(memory_format=torch.contiguous_format)
                return
            try:
                self._host = tensor.to("cpu", non_blocking=True)
                event = torch.Event(tensor.device)
                event.record(torch.accelerator.current_stream(tensor.device))
                self._event = event
            except (
                RuntimeError,
                ValueError,
            ):  # no pinned memory, no events, or not the accelerator of torch: it is waited for
                self._host = tensor.to("cpu")

    def wait(self) -> torch.Tensor:
        """The copy, once it is complete.

        It looks now and then: the wait of an event itself would keep a processor busy, and a step of
        the training may take seconds.
        """
        pause = _SHORTEST
        while self._event is not None and not self._event.query():
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST)
        self._event = None
        return self._host
