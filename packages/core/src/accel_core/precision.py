"""Precision as a value: which dtype is used where, and how a model is made to honour it.

A policy says what is wanted; the strategy honours it, or raises. What a policy needs beyond dtypes (a loss scaler,
converted modules) is the business of the precision component that brings the policy.
"""

from __future__ import annotations

from abc import ABC
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import torch

from accel_core.dressing import Dress, dress, undress
from accel_core.tree import map_tensors

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class PrecisionPolicy:
    """The five dtypes of a training run. None leaves tensors as they are.

    Args:
        param: the dtype in which parameters are stored.
        compute: the dtype of matrix products and convolutions (autocast), while everything else stays in full precision.
        reduce: the dtype in which gradients travel between ranks.
        output: the dtype to which floating leaves of what the model returns are cast.
        input: the dtype to which floating leaves of what the model receives are cast; integers are never touched.
    """

    param: torch.dtype | None = None
    compute: torch.dtype | None = None
    reduce: torch.dtype | None = None
    output: torch.dtype | None = None
    input: torch.dtype | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            dtype = getattr(self, field.name)
            if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
                raise ValueError(
                    f"PrecisionPolicy({field.name}={dtype!r}): expected a floating torch.dtype such as torch.bfloat16, "
                    f"or None to leave tensors as they are."
                )

    @property
    def dresses_calls(self) -> bool:
        """Whether calls of a model need anything done around them."""
        return self.compute is not None or self.output is not None or self.input is not None


FULL = PrecisionPolicy()
"""Full precision: nothing is cast anywhere, and nothing is spent on finding that out."""


class Precision(ABC):  # noqa: B024  (nothing is mandatory but the policy)
    """What a precision component is: a policy, and whichever hooks it needs (`scale_loss`, `optimizer_step`, …).

    The constructor's arguments are its options, all optional. Subclass it directly, and set `policy`.
    """

    policy: PrecisionPolicy = FULL


class FullPrecision(Precision):
    """`mixed_precision="no"`: everything stays in the dtype that the user gave it."""


_POLICY = "_accel_policy"


class _Precise(Dress):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        device_type, policy = vars(self)[_POLICY]
        if policy.input is not None:
            args, kwargs = _cast(args, policy.input), _cast(kwargs, policy.input)
        if policy.compute is None:
            output = super().__call__(*args, **kwargs)  # type: ignore[misc]
        else:
            with torch.autocast(device_type, dtype=policy.compute):
                output = super().__call__(*args, **kwargs)  # type: ignore[misc]
        return output if policy.output is None else _cast(output, policy.output)


def apply_policy(model: nn.Module, policy: PrecisionPolicy, device_type: str) -> None:
    """Makes a model honour `param`, `compute`, `output` and `input`, in place.

    `__call__` is overridden, and not `forward`: that would be bypassed by forwards set on the instance, by compilation
    and by scripting, which then run in full precision without a word. A full-precision policy leaves the model alone.
    """
    if policy.param is not None:
        model.to(policy.param)
    if policy.dresses_calls:
        vars(model)[_POLICY] = (device_type, policy)
        dress(model, _Precise)


def remove_policy(model: nn.Module) -> None:
    """Gives a model its original class back; parameters keep their dtype."""
    undress(model, _Precise)
    vars(model).pop(_POLICY, None)


def _cast(tree: Any, dtype: torch.dtype) -> Any:
    return map_tensors(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, tree)
