"""The values of a `Histogram`, as one tensor with memory of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from accel_trackers.recording.scalars import as_array, describe, is_array, readable_here


def as_tensor(values: Any) -> torch.Tensor:
    """A copy of the values of a `Histogram`, on the device where they are. Waits for no device.

    Raises:
        TypeError: if they cannot be counted.
    """
    try:
        if isinstance(values, torch.Tensor):
            return _real(values).clone(memory_format=torch.contiguous_format)
        if is_array(values):
            return _from_array(as_array(values))
        if isinstance(values, Sequence) and not isinstance(values, (str, bytes)):
            return _from_sequence(values)
        raise TypeError("neither a tensor nor a sequence")
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise TypeError(
            f"Histogram(values) was given {describe(values)}: expected a tensor, an array, or a list of real numbers. Found: {error}."
        ) from None


def _real(tensor: torch.Tensor) -> torch.Tensor:
    here = readable_here(tensor)
    if here.is_complex():
        raise TypeError(f"{describe(tensor)} of {here.dtype}: take value.abs()")
    return here


def _from_array(array: Any) -> torch.Tensor:
    if array.dtype.kind not in "biuf":
        raise TypeError(f"the dtype {array.dtype}")
    # float64 is also what the values are counted in; so it is no loss for the dtypes that torch lacks.
    return torch.from_numpy(array.astype("float64", order="C"))


def _from_sequence(values: Sequence[Any]) -> torch.Tensor:
    if values and isinstance(values[0], torch.Tensor):
        return torch.cat([_real(each).reshape(-1) for each in values])
    if any(isinstance(each, (str, bytes)) for each in values):
        raise TypeError("texts")
    return torch.tensor(values, dtype=torch.float64, device="cpu")
