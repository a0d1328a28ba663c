"""A precision in fifty lines: products in bfloat16, by weights that are rounded to a few bits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import torch
from torch import nn
from torch.nn import functional as F

from accel_core import Precision, PrecisionPolicy, hookimpl

__all__ = ["HelloRounding"]


class HelloRounding(Precision):
    """Linear layers inside a model multiply by rounded weights, so that they learn what survives on a small chip.

    Args:
        bits: of a rounded weight, its sign included: 2 to 16.
    """

    policy = PrecisionPolicy(compute=torch.bfloat16, output=torch.float32)

    def __init__(self, bits: int = 8) -> None:
        if not 2 <= bits <= 16:
            raise ValueError(
                f"HelloRounding(bits={bits}): expected 2 to 16, the bits of a rounded weight with its sign."
            )
        self._bits = bits
        self._converted = 0

    @hookimpl
    def convert_model(self, model: nn.Module) -> None:
        """Puts a rounding layer in the place of each linear one. Parameters stay the objects that they are."""
        for parent in list(model.modules()):
            for name, child in list(parent.named_children()):
                if type(child) is nn.Linear:
                    setattr(parent, name, _Rounded.of(child, 2 ** (self._bits - 1) - 1))
                    self._converted += 1

    @hookimpl
    def revert_model(self, model: nn.Module) -> None:
        """Puts the linear layers back, for a model that is freed computes as the user built it."""
        for parent in list(model.modules()):
            for name, child in list(parent.named_children()):
                if type(child) is _Rounded:
                    setattr(parent, name, child.plain())

    def details(self) -> Mapping[str, str]:
        """The dtypes, and how much was converted."""
        return {
            "policy": str(self.policy),
            "converted": f"{self._converted} nn.Linear, to weights of {self._bits} bits",
        }


class _Rounded(nn.Linear):
    """Computes with whole multiples of a step; gradients pass to the weight as if it were not rounded."""

    levels: int

    @classmethod
    def of(cls, layer: nn.Linear, levels: int) -> _Rounded:
        rounded = cls.__new__(cls)
        vars(rounded).update(vars(layer), levels=levels)  # its parameters, its hooks, its mode
        return rounded

    def plain(self) -> nn.Linear:
        layer = nn.Linear.__new__(nn.Linear)
        vars(layer).update({name: value for name, value in vars(self).items() if name != "levels"})
        return layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight.detach()
        step = weight.abs().amax().clamp_min(torch.finfo(weight.dtype).tiny) / self.levels
        rounded = (weight / step).round() * step
        return cast("torch.Tensor", F.linear(x, self.weight + (rounded - weight), self.bias))
