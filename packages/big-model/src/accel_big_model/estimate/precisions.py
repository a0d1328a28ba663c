"""Dtypes of a training run by one name: those of `Accelerator(mixed_precision=...)`, and torch's."""

from __future__ import annotations

from types import MappingProxyType
from typing import NamedTuple

import torch

from accel_big_model.estimate.inputs import unknown


class Precision(NamedTuple):
    """The dtypes by a name.

    Args:
        name: as it is shown.
        param: of floating parameters and their gradients; None: they are not trained in it.
        compute: of matrix products, by autocast; None: the parameters' own.
        bits: of an element of a weight.
    """

    name: str
    param: torch.dtype | None
    compute: torch.dtype | None
    bits: int


PRECISIONS = MappingProxyType(
    {
        each.name: each
        for each in (
            Precision("fp32", torch.float32, None, 32),
            Precision("bf16", torch.float32, torch.bfloat16, 32),
            Precision("fp16", torch.float32, torch.float16, 32),
            Precision("bf16-true", torch.bfloat16, None, 16),
            Precision("fp16-true", torch.float16, None, 16),
            Precision("int8", None, None, 8),
            Precision("int4", None, None, 4),
        )
    }
)
_TORCH = {"no": "fp32", "tf32": "fp32", "float32": "fp32", "bfloat16": "bf16-true", "float16": "fp16-true"}


def read_precision(name: str) -> Precision:
    """The dtypes of a name. "float16" and "bfloat16" are of weights, as in the peer's command.

    Raises `ValueError` for an unknown one.
    """
    found = PRECISIONS.get(_TORCH.get(name, name))
    if found is None:
        raise unknown("dtype", name, [*PRECISIONS, *_TORCH])
    return found
