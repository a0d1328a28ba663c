"""What torch's engine of FSDP lacks in some version from 2.9 on, by what it has instead."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch import nn


def param_groups(state: Any) -> list[Any]:
    """The engine's groups of parameters of a unit; before torch 2.13, there is one or none."""
    if hasattr(state, "_fsdp_param_groups"):
        groups: list[Any] = state._fsdp_param_groups
        return groups
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def reduce_unused(model: nn.Module, reduce: bool) -> None:
    """Says whether gradients of parameters without one travel as zeros; before 2.13 torch cannot.

    Args:
        model: the root, when all units are sharded.
        reduce: whether they travel.
    """
    if hasattr(model, "set_reduce_scatter_unused_params"):
        model.set_reduce_scatter_unused_params(reduce)  # type: ignore[operator]
        return
    from torch.distributed.fsdp import FSDPModule

    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for group in {id(group): group for unit in units for group in param_groups(unit._get_fsdp_state())}.values():
        group.reduce_scatter_unused_params = reduce
        if reduce:
            ZerosForUnused(group)


class ZerosForUnused:
    """Gives parameters without a gradient zeros when the others travel, as torch 2.13 does.

    Args:
        group: the engine's group of a unit's parameters.
    """

    def __init__(self, group: Any) -> None:
        self._group, self._post_backward = group, group.post_backward
        group.post_backward = self.post_backward

    def post_backward(self, *unused: Any) -> None:
        """The engine's, after the zeros are there."""
        for cut in self._group.fsdp_params if self._group.reduce_grads else ():
            cut.accumulate_unsharded_grad_if_needed()
            parameter = getattr(cut, "_unsharded_param", None)
            if (
                parameter is not None
                and parameter.requires_grad
                and parameter.grad is None
                and cut.unsharded_accumulated_grad is None
            ):
                parameter.grad = torch.zeros_like(parameter)
        self._post_backward(*unused)
