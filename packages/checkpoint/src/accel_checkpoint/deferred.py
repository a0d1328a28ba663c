"""Tensors that stand for data kept elsewhere, such as offloaded weights: read when they are written."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol, cast

import torch

from accel_core import CheckpointError


class Deferred(Protocol):
    """What the class of such a tensor has; the tensor is on the meta device, with shape and dtype."""

    def accel_read(self) -> torch.Tensor:
        """The data, of this shape and dtype, in CPU memory."""

    def accel_resident(self) -> torch.Tensor | None:
        """The tensor of the model that it is tied to, if that has its data."""


def is_deferred(tensor: Any) -> bool:
    """Whether a tensor stands for data that are kept elsewhere."""
    return hasattr(type(tensor), "accel_read")


def data_of(tensor: Any) -> Any:
    """The tensor itself, or the data that it stands for, read now."""
    if not is_deferred(tensor):
        return tensor
    found = cast("Deferred", tensor).accel_read()
    if hasattr(found, "__tensor_flatten__"):
        raise CheckpointError(
            f"An offloaded weight was to be written, but it is a {type(found).__name__}, no plain tensor. Save the model before "
            f"its weights are quantised."
        )
    return found


def resident(tensor: Any) -> Any:
    """The tensor itself, or the one that is tied to it and has its data."""
    found = cast("Deferred", tensor).accel_resident() if is_deferred(tensor) else None
    return tensor if found is None else found


def refuse_deferred(tensors: Iterable[Any]) -> None:
    """Raises where all would have to be in memory at once."""
    if any(map(is_deferred, tensors)):
        raise CheckpointError(
            "save_state(asynchronous=...) copies what it saves, and would bring all offloaded weights into memory. Leave asynchronous= out: "
            "then they are written one after the other."
        )
