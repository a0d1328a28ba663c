"""Histograms: copied where they are logged, and counted by the tracker's thread."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from accel_core import Bins
from accel_trackers.recording.values import HostCopy, as_array, describe, is_array, local

if TYPE_CHECKING:
    from accel_core import Histogram

_PART = 1 << 20  # how many values are counted at a time: in float64 these are 8 MiB
_LARGEST = 1.7976931348623157e308  # of a float


def copied(histogram: Histogram) -> HostCopy:
    """The values now, without waiting for a device. TypeError if they cannot be counted."""
    try:
        return HostCopy(_as_tensor(histogram.values))
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise TypeError(
            f"Histogram(values) was given {describe(histogram.values)}: expected a tensor, an array, or a list of real numbers. "
            f"Found: {error}."
        ) from None


def _as_tensor(values: Any) -> torch.Tensor:
    if is_array(values):
        array = as_array(values)
        if array.dtype.kind not in "biuf":
            raise TypeError(f"the dtype {array.dtype}")
        # float64 is also what the values are counted in; so it is no loss for the dtypes that torch lacks.
        return torch.from_numpy(array.astype("float64", order="C"))
    if not isinstance(values, torch.Tensor):
        if isinstance(values, (str, bytes)) or not isinstance(values, Sequence):
            raise TypeError("neither a tensor nor a sequence")
        if not values or not isinstance(values[0], torch.Tensor):
            return torch.tensor(values, dtype=torch.float64, device="cpu")
        values = torch.cat([local(each).reshape(-1) for each in values])
    if values.is_complex():
        raise TypeError(f"the dtype {values.dtype}: take value.abs()")
    return local(values)


def count(values: torch.Tensor, bins: int) -> Bins:
    """The histogram of a tensor in CPU memory."""
    parts = values.reshape(-1).split(_PART)
    low, high, total, squares, finite = math.inf, -math.inf, 0.0, 0.0, 0
    for part in map(_finite, parts):
        if part.numel():
            low, high = min(low, part.min().item()), max(high, part.max().item())
            total += part.sum().item()
            squares += part.square().sum().item()
            finite += part.numel()
    edges = _edges(low, high, bins) if finite else _edges(0.0, 1.0, bins)
    inner = torch.tensor(edges[1:-1], dtype=torch.float64, device="cpu")
    counts = torch.zeros(bins, dtype=torch.int64, device="cpu")
    for part in map(_finite, parts):
        counts += torch.bincount(torch.bucketize(part, inner, right=True), minlength=bins)
    return Bins(tuple(counts.tolist()), edges, total, squares, values.numel() - finite)


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
