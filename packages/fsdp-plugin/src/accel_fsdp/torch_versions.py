"""What torch's engine of FSDP lacks in some version from 2.9 on, by what it has instead."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from torch import nn


def param_groups(state: Any) -> list[Any]:
    """The engine's groups of parameters of a unit; before torch 2.13, there is one or none."""
    if hasattr(state, "_fsdp_param_groups"):
        groups: list[Any] = state._fsdp_param_groups
        return groups
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def has_one_policy(group: Any) -> bool:
    """Whether all parameters of a group have one policy of dtypes; since torch 2.15, each has its own."""
    return hasattr(group, "mp_policy")


def expect_unfreezing(unit: nn.Module | list[nn.Module]) -> None:
    """Has a unit that is frozen as a whole know its dtypes too, for the time when it is trained.

    The engine looks once, at the first forward, and before torch 2.15 at trained parameters alone.
    """
    root: Any = unit[0] if isinstance(unit, list) else unit
    for group in filter(has_one_policy, param_groups(root._get_fsdp_state())):
        group._init_mp_dtypes = partial(_init_dtypes, group, group._init_mp_dtypes)


def _init_dtypes(group: Any, engines: Callable[[], None]) -> None:
    engines()
    if group._orig_dtype is None:
        group._orig_dtype, group._reduce_dtype = group.fsdp_params[0].orig_dtype, group.fsdp_params[0].reduce_dtype


def is_gathered_once(cut: Any) -> bool:
    """Whether the tensor that a parameter is gathered into has been made: it is made once."""
    return hasattr(cut, "_unsharded_param")


def held_gradient(cut: Any) -> torch.Tensor | None:
    """The whole local gradient of one parameter that waits for a backward that synchronises."""
    if not is_gathered_once(cut):
        return None
    gradient: torch.Tensor | None = cut._unsharded_param.grad
    # Before torch 2.15, the second has another dtype than the gradients of a backward: that in which they travel.
    return gradient if gradient is not None else cut.unsharded_accumulated_grad


def drop_held_gradient(cut: Any) -> None:
    """Forgets it."""
    cut._unsharded_param.grad = None
    if cut.unsharded_accumulated_grad is not None:  # of its own before torch 2.15
        cut.unsharded_accumulated_grad = None


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


def reset_iter_state(model: nn.Module) -> None:
    """Forgets a forward or backward that raised, and shards parameters again; before 2.13 torch cannot.

    Args:
        model: the root.
    """
    if hasattr(model, "reset_iter_state"):
        model.reset_iter_state()  # type: ignore[operator]
        return
    from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

    root: Any = model._get_fsdp_state()  # type: ignore[operator]
    root._device_handle.synchronize()  # instead of waiting for what each stream still does
    root._comm_ctx.all_gather_state = root._comm_ctx.reduce_scatter_state = None
    root._comm_ctx.post_forward_order.clear()
    for state in root._state_ctx.all_states:
        state._modules_to_run_forward.clear()
        state._training_state = TrainingState.IDLE
        for group in param_groups(state):
            _drop_transfers(group)
            group._training_state = TrainingState.IDLE
            group._to_sharded()
    root._state_ctx.iter_forward_root = None
    root._state_ctx.post_backward_final_callback_queued = False


def _drop_transfers(group: Any) -> None:
    gathers = getattr(group._all_gather_result, "all_gather_work", None)
    if isinstance(gathers, dist.Work):
        gathers.wait()
    group._all_gather_result = group._reshard_after_forward_event = group._partial_reduce_output = None
    group._post_reduce_event = group._all_reduce_state = None
    group._post_forward_indices.clear()


class ZerosForUnused:
    """Gives parameters without a gradient zeros when the others travel, as torch 2.13 does.

    Args:
        group: the engine's group of a unit's parameters.
    """

    def __init__(self, group: Any) -> None:
        self._group, self._other = group, vars(group).get("post_backward")  # what this package has put there before
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
        if self._other is None:  # torch's own is looked up when it is called
            type(self._group).post_backward(self._group, *unused)
        else:
            self._other(*unused)
