"""Precision as a value: which dtype is used where, and how a model is made to honour it."""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from operator import methodcaller
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from accel_core.base.class_override import ClassOverride, override_class, restore_class
from accel_core.base.nested import map_tensors
from accel_core.options.handlers import AutocastKwargs

if TYPE_CHECKING:
    from torch import nn

    from accel_core.options.handlers import KwargsHandler


@dataclass(frozen=True)
class PrecisionPolicy:
    """The five dtypes of a training run. None leaves tensors as they are.

    Args:
        param: of stored parameters.
        compute: of matrix products and convolutions (autocast); the rest stays in full precision.
        reduce: of gradients that travel between ranks.
        output, input: to which floating leaves of what the model returns and receives are cast.
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
                raise ValueError(f"PrecisionPolicy({field.name}={dtype!r}): expected a floating torch.dtype, or None.")

    def __str__(self) -> str:
        given = {name: dtype for name, dtype in vars(self).items() if dtype is not None}
        return ", ".join(f"{name} {dtype}" for name, dtype in given.items()).replace("torch.", "") or "as it is"


FULL = PrecisionPolicy()
"""Full precision: nothing is cast anywhere."""


class Precision(ABC):  # noqa: B024  (nothing is mandatory but the policy)
    """A precision component: a policy, and the hooks it needs (`scale_loss`, `optimizer_step`, …).

    Subclass it directly, and set `policy`. The constructor's arguments are its options, all optional;
    `handlers`: classes of option objects, one of which may stand for them in `kwargs_handlers`.
    """

    policy: PrecisionPolicy = FULL
    handlers: ClassVar[tuple[type[KwargsHandler], ...]] = ()

    def details(self) -> Mapping[str, str]:
        """Details for `accelerator.explain()`, as text: the requested precision and its state."""
        return MappingProxyType({} if self.policy == FULL else {"policy": str(self.policy)})


class FullPrecision(Precision):
    """Leaves everything in the number format that the script gave it."""


_POLICY = "_accel_policy"


class _Precise(ClassOverride):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        device_type, policy, autocast = vars(self)[_POLICY]
        if policy.input is not None:
            args, kwargs = _cast(args, policy.input), _cast(kwargs, policy.input)
        if policy.compute is None:
            output = super().__call__(*args, **kwargs)  # type: ignore[misc]
        else:
            with torch.autocast(device_type, policy.compute, autocast.enabled, autocast.cache_enabled):
                output = super().__call__(*args, **kwargs)  # type: ignore[misc]
        return output if policy.output is None else _cast(output, policy.output)


def cast_parameters(model: nn.Module, policy: PrecisionPolicy) -> None:
    """Casts parameters and floating buffers to `param`, in place. They stay the same objects."""
    dtype = policy.param
    if dtype is not None:
        # As `model.to(dtype)`, which would make complex buffers (of rotary embeddings, say) real.
        model._apply(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)


def override_calls(
    model: nn.Module, policy: PrecisionPolicy, device_type: str, autocast: AutocastKwargs | None = None
) -> None:
    """Makes a model's calls honour `compute`, `output`, `input`, in place, if any is set.

    `__call__` is overridden: forwards set on the instance, compilation and scripting bypass
    `forward`, and would run in full precision. A strategy changes a model's class before this.
    """
    remove_policy(model)  # that of an earlier Accelerator
    if not policy.compute is policy.output is policy.input is None:
        vars(model)[_POLICY] = (device_type, policy, autocast or AutocastKwargs())
        override_class(model, _Precise)


def remove_policy(model: nn.Module) -> None:
    """Gives a model its original class back; parameters keep their dtype."""
    restore_class(model, _Precise)
    vars(model).pop(_POLICY, None)


# `tensor.float()` takes two thirds of the time of `tensor.to(torch.float32)`.
_CASTS: dict[torch.dtype, Callable[[torch.Tensor], torch.Tensor]] = {
    torch.float32: torch.Tensor.float,
    torch.float16: torch.Tensor.half,
    torch.bfloat16: torch.Tensor.bfloat16,
}


def _cast(tree: Any, dtype: torch.dtype) -> Any:
    return _cast_by(_CASTS.get(dtype) or methodcaller("to", dtype), tree)


def _cast_by(cast: Callable[[torch.Tensor], torch.Tensor], tree: Any) -> Any:
    # The plain containers first: this is done to every output.
    kind = type(tree)
    if kind is torch.Tensor:
        return cast(tree) if tree.is_floating_point() else tree
    if kind is dict:
        return {key: _cast_by(cast, value) for key, value in tree.items()}
    if kind is list:
        return [_cast_by(cast, value) for value in tree]
    if kind is tuple:
        return tuple([_cast_by(cast, value) for value in tree])
    return map_tensors(lambda tensor: cast(tensor) if tensor.is_floating_point() else tensor, tree)
