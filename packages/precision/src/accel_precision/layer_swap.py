"""Changing what a linear layer is, in place.

Replacing the layer in its parent would lose hooks, attributes and every other reference to it.
Instead it becomes what the engine made of it: it takes over class and attributes, and keeps its
identity, its hooks and its name in `state_dict()`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from accel_core.api.component import ClassOverride, override_class

_ADDED = "_accel_added"


def become(layer: nn.Linear, other: nn.Linear, calls: type[FilledRows]) -> None:
    """Makes `layer` what `other` is, which an engine made of it.

    Args:
        layer: one of the model's, of the class `nn.Linear`.
        other: of a subclass, with the same parameters, or with a weight that wraps the layer's.
        calls: how it is called.
    """
    added = {name: value for name, value in vars(other).items() if name not in vars(layer)}
    vars(layer).update(added)
    vars(layer)[_ADDED] = tuple(added)
    if other.weight is not layer.weight:
        layer.weight = other.weight
    layer.__class__ = type(other)
    override_class(layer, calls)


def revert(layer: nn.Linear) -> None:
    """Makes a converted layer an `nn.Linear` again, with its weight; leaves others alone.

    Classes that a strategy has made around it since, to shard it for instance, stay around it. A
    layer whose weight is cut, and arrives in the layer's own format when it is gathered, stays what
    it has become: an `nn.Linear` could not compute with that.
    """
    if not has_become(layer) or _arrives_converted(layer.weight):
        return
    for name in vars(layer).pop(_ADDED):
        vars(layer).pop(name, None)
    layer.__class__ = _without(type(layer))


def _without(kind: type) -> Any:
    """A class like `kind`, around `nn.Linear` instead of what a layer became."""
    if kind.__bases__[0] in (Rows16, Rows32):
        return nn.Linear
    bases = [_without(base) if issubclass(base, FilledRows) else base for base in kind.__bases__]
    own = {name: value for name, value in vars(kind).items() if name not in ("__dict__", "__weakref__")}
    return type(kind)(kind.__name__, tuple(bases), own)


def _arrives_converted(weight: Any) -> bool:
    # The protocol by which a tensor tells `fully_shard` what is to travel in its place.
    return hasattr(weight, "to_local") and hasattr(weight.detach().to_local(), "fsdp_pre_all_gather")


def revert_all(model: nn.Module) -> None:
    """Makes all layers of a model that became something else an `nn.Linear` again."""
    for module in list(model.modules()):
        if isinstance(module, nn.Linear):
            revert(module)


def has_become(layer: nn.Linear) -> bool:
    """Whether `become` changed it."""
    return _ADDED in vars(layer)


class FilledRows(ClassOverride):
    """Calls a layer whose kernels want a multiple of rows (the product of all dims but the last).

    Rows of zeros are appended and cut off again: they change no scale, no gradient and no other
    row. The input comes in the dtype of autocast, on every kind of device; engines look at autocast
    for one kind only, or not at all.
    """

    def _filled(self, input: torch.Tensor, multiple: int, call: Any) -> torch.Tensor:
        kind = input.device.type
        if not torch.is_autocast_enabled(kind):
            return _call(input, multiple, call)
        # Under autocast the products inside would cast what is in eight bits already, which takes longer than this block.
        with torch.autocast(kind, enabled=False):
            return _call(input.to(torch.get_autocast_dtype(kind)), multiple, call)


class Rows16(FilledRows):
    """For products in fp8: 16 rows."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """(..., in_features) to (..., out_features)."""
        return self._filled(input, 16, super().forward)  # type: ignore[misc]


class Rows32(FilledRows):
    """For MX formats, whose blocks have 32 elements along either dim."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """(..., in_features) to (..., out_features)."""
        return self._filled(input, 32, super().forward)  # type: ignore[misc]


def _call(input: torch.Tensor, multiple: int, call: Any) -> torch.Tensor:
    lead = input.shape[:-1]
    rows = lead.numel()
    missing = -rows % multiple
    output: torch.Tensor
    if not missing:
        output = call(input)
        return output
    output = call(F.pad(input.reshape(rows, input.shape[-1]), (0, 0, 0, missing)))
    return output[:rows].reshape(*lead, output.shape[-1])
