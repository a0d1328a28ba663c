"""Histograms: copied where they are logged, and counted by the tracker's thread."""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch

from accel_core import Bins
from accel_trackers.recording.countable import as_tensor
from accel_trackers.recording.device_copy import copied_to_host, mark

if TYPE_CHECKING:
    from accel_core import Histogram

_PART = 1 << 20  # how many values are counted at a time: in float64 these are 8 MiB
_LARGEST = 1.7976931348623157e308  # of a float


class CopiedHistogram:
    """The values of a histogram as they are now, whatever becomes of them. Making one waits for no device.

    Raises:
        TypeError: if they cannot be counted.
    """

    def __init__(self, histogram: Histogram) -> None:
        self._bins = histogram.bins
        values = as_tensor(histogram.values)
        self._values: torch.Tensor | None = values
        self._mark = None if values.is_cpu else mark(values.device)
        self._result: Bins | None = None
        self._lock = threading.Lock()
        self.elements = values.numel()

    def resolve(self) -> Bins:
        """Counts, once. Waits for the device, so it is for another thread than the training's."""
        with self._lock:
            if self._result is None:
                assert self._values is not None, "let go of when they are counted"
                self._result = _counted(copied_to_host(self._values, self._mark), self._bins)
                self._values = None
            return self._result


def _counted(values: torch.Tensor, bins: int) -> Bins:
    flat = values.reshape(-1)
    parts: Callable[[], Iterator[torch.Tensor]] = lambda: map(_finite, flat.split(_PART))  # noqa: E731
    low, high, total, squares, count = math.inf, -math.inf, 0.0, 0.0, 0
    for part in parts():
        if part.numel():
            low, high = min(low, part.min().item()), max(high, part.max().item())
            total += part.sum().item()
            squares += part.square().sum().item()
            count += part.numel()
    edges = _edges(low, high, bins) if count else _edges(0.0, 1.0, bins)
    inner = torch.tensor(edges[1:-1], dtype=torch.float64, device="cpu")
    counts = torch.zeros(bins, dtype=torch.int64, device="cpu")
    for part in parts():
        counts += torch.bincount(torch.bucketize(part, inner, right=True), minlength=bins)
    return Bins(tuple(counts.tolist()), edges, total, squares, flat.numel() - count)


def _finite(part: torch.Tensor) -> torch.Tensor:
    exact = part.to(torch.float64)
    return exact[exact.isfinite()]


def _edges(low: float, high: float, bins: int) -> tuple[float, ...]:
    """Equally far apart from `low` to `high`, or further where floats are too coarse for that."""
    margin = 0.0 if low < high else (max(abs(low), abs(high)) / 2 or 0.5)
    while True:
        first, last = max(low - margin, -_LARGEST), min(high + margin, _LARGEST)
        shares = [index / bins for index in range(1, bins)]
        edges = (first, *(first * (1 - share) + last * share for share in shares), last)
        if all(left < right for left, right in itertools.pairwise(edges)):
            return edges
        margin = max(2 * margin, bins * math.ulp(max(abs(low), abs(high))))
