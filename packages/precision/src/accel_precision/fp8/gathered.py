"""Weights that travel in fp8: where their ordinary memory is."""

from __future__ import annotations

import torch

_WRAPPER = ("torchao.float8.fsdp_utils", "WeightWithDynamicFloat8CastTensor")


def plain_weight(tensor: torch.Tensor) -> torch.Tensor:
    """The ordinary tensor inside a weight that is to be gathered in fp8; any other tensor as it is.

    Such a weight (`FP8(enable_fsdp_float8_all_gather=True)`) is stored in its full precision and
    rounded when it travels. What is saved and loaded is the tensor inside: a strategy that shards
    parameters calls this on its local part. Nothing is imported.

    Args:
        tensor: the local part of a parameter, or anything laid out like one.

    Returns:
        The memory that optimizers change, with the same shape and dtype.
    """
    kind = type(tensor)
    if (kind.__module__, kind.__qualname__) != _WRAPPER:
        return tensor
    # It has no public name; the class says so itself, in what it flattens into. Tried with torchao 0.18.
    inside: torch.Tensor = getattr(tensor, tensor.__tensor_flatten__()[0][0])  # type: ignore[attr-defined]
    return inside
