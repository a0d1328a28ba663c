"""Outputs of units that are no views of other tensors.

The engine gathers a unit for its backward when the gradient of an output arrives, which a hook on
that output tells. A change in place of an output that is a view drops the hook, and the backward
goes on with what is there: torch warns of it wherever a unit returns a view, as every linear layer
with a bias does for inputs of three dims. So a view is returned as a tensor of its own, in the same
memory, whose hook survives.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from accel_core.api.component import map_tensors

if TYPE_CHECKING:
    from torch import nn


def return_no_views(unit: nn.Module | list[nn.Module]) -> None:
    """Has the modules of a unit return tensors of their own. Before `fully_shard` hooks them."""
    for module in unit if isinstance(unit, list) else [unit]:
        module.register_forward_hook(_without_views)


def _without_views(_: nn.Module, __: Any, output: Any) -> Any:
    if not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return output
    return _apart(output) if type(output) is torch.Tensor else map_tensors(_apart, output)


def _apart(tensor: torch.Tensor) -> torch.Tensor:
    if not (tensor.requires_grad and tensor._is_view()):
        return tensor
    apart: torch.Tensor = _Apart.apply(tensor)  # type: ignore[no-untyped-call]
    return apart


class _Apart(torch.autograd.Function):
    """The identity in the same memory. Who saved the view notices changes in place."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:  # noqa: ARG004
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # noqa: ARG004
        return gradient
