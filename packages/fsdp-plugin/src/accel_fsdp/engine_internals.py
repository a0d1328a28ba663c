"""Gradients that have not travelled, and other state of torch's engine that has no public name.

All private attributes of `torch.distributed.fsdp` that this package uses are used here, in
`torch_versions` and in `several_dtypes`. Tried with torch 2.9, 2.13, 2.14 and 2.15.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from accel_core.api.component import all_gather_single
from accel_fsdp.several_dtypes import SeveralDtypes
from accel_fsdp.sharding import local_of
from accel_fsdp.torch_versions import (
    drop_held_gradient,
    has_one_policy,
    held_gradient,
    is_gathered_once,
    param_groups,
)

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from accel_core import World

MOST_SIZES = 64
"""How many process groups units of unlike sizes gather in, at most."""


def cut_parameters(units: Iterable[nn.Module]) -> list[Any]:
    """The engine's record of each parameter of some units, once."""
    states = {id(state): state for state in map(engine_state, units)}
    return [cut for state in states.values() for group in param_groups(state) for cut in group.fsdp_params]


def held_gradients(model: nn.Module, cuts: Iterable[Any]) -> dict[str, torch.Tensor]:
    """The whole local gradients that wait for a synchronising backward, live, by parameter.

    Args:
        model: the root.
        cuts: all its `cut_parameters`.
    """
    held = [(cut, gradient) for cut in cuts if (gradient := held_gradient(cut)) is not None]
    return _by_name(model, held) if held else {}


def drop_held(cuts: Iterable[Any]) -> None:
    """Forgets them."""
    for cut in cuts:
        if held_gradient(cut) is not None:
            drop_held_gradient(cut)


def gathered_parameters(model: nn.Module, cuts: Iterable[Any]) -> dict[str, torch.Tensor]:
    """The gathered parameters that the model shows while it computes, by name; never stepped."""
    return _by_name(model, [(cut, cut._unsharded_param) for cut in cuts if is_gathered_once(cut)])


def is_gathered(tensor: torch.Tensor, cuts: Iterable[Any]) -> bool:
    """Whether a tensor is a gathered parameter or a view of one, whose memory will go."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return False
    memory = tensor.untyped_storage().data_ptr()
    return any(
        local_of(cut._unsharded_param).untyped_storage().data_ptr() == memory for cut in cuts if is_gathered_once(cut)
    )


def parts_behind(cuts: Iterable[Any]) -> dict[int, torch.Tensor]:
    """The sharded parameters, which are stepped, by the `id` of the gathered ones."""
    return {id(cut._unsharded_param): cut.sharded_param for cut in cuts if is_gathered_once(cut)}


def clear(cuts: Iterable[Any], set_to_none: bool) -> None:
    """Clears the gradients of shards, of gathered parameters, and those that were held back."""
    cuts = list(cuts)
    drop_held(cuts)
    for gradient in [cut.sharded_param.grad for cut in cuts if not set_to_none and cut.sharded_param.grad is not None]:
        gradient.zero_()
    for cut in cuts if set_to_none else ():
        cut.sharded_param.grad = None


def is_any_gathered(state: Any) -> bool:
    """Whether parameters of a unit are gathered; `reshard()` costs microseconds anyway."""
    return any(not group.is_sharded for group in param_groups(state))


def was_interrupted(state: Any) -> bool:
    """Whether a backward raised before its end: the engine would go on and reduce nothing.

    Args:
        state: the `engine_state` of a root.
    """
    return is_in_backward(state) and current_backward() == -1  # else this call is a part of it: recomputation


def is_in_backward(state: Any) -> bool:
    """Whether a backward has reached the model and not its end.

    It queues a callback for its end, and the flag is cleared there.

    Args:
        state: the `engine_state` of a root.
    """
    queued: bool = state._state_ctx.post_backward_final_callback_queued
    return queued


def current_backward() -> int:
    """A number for the backward that runs in this thread; -1 if none does."""
    return torch._C._current_graph_task_id()


def refuse_second_derivatives(units: Iterable[nn.Module]) -> None:
    """Has a backward raise that is to be differentiated itself, before it reaches the units.

    The engine sends gradients and cuts parameters when a unit's first backward is done, and knows
    of no second one through it: gradients that come later are never sent, and weights that it needs
    are gone.
    """
    for state in {id(state): state for state in map(engine_state, units)}.values():
        # Looked up by the engine in each forward, and called with the gradient of each output.
        state._pre_backward = partial(_pre_backward, state._pre_backward)


def _pre_backward(engines: Callable[[torch.Tensor], torch.Tensor], gradient: torch.Tensor) -> torch.Tensor:
    if torch.is_grad_enabled():  # which it is in a backward with create_graph=True alone
        raise RuntimeError(
            "A backward with create_graph=True was to go through a model that FSDP has sharded (a gradient penalty, say), and gradients of "
            "second derivatives would be missing in it. Train this model with strategy='ddp', or in one process with strategy='single'; a "
            "GAN may have its critic under an Accelerator(strategy='ddp') of its own."
        )
    return engines(gradient)


def keep_in_parts(unit: nn.Module | list[nn.Module], mesh: DeviceMesh) -> None:
    """Keeps a unit's parameters sharded on the second dim of `mesh` between forward and backward.

    That is what a number as `reshard_after_forward` of `fully_shard` does, with a mesh that was
    made elsewhere.
    """
    from torch.distributed.fsdp._fully_shard._fsdp_common import HSDPMeshInfo

    info = HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0)
    for group in param_groups(engine_state(unit[0] if isinstance(unit, list) else unit)):
        group.post_forward_mesh_info = info
        for cut in group.fsdp_params:
            cut.post_forward_mesh_info = info
            cut._init_sharded_post_forward_param_metadata(torch.empty(cut._orig_size, device="meta"))


def gather_apart(model: nn.Module, world: World) -> None:
    """Has units of unlike sizes gather in own process groups, on CPUs. Collective, once per size.

    Where one rank calls the model once more than another, they gather different units. In one
    group, gloo would end the process of the one with the smaller unit; in two they wait, and the
    Watch names both. Other backends end nobody.
    """
    if world.device.type != "cpu" or world.size == 1:
        return
    for state in dict.fromkeys(state for module in model.modules() if (state := engine_state(module)) is not None):
        for group in param_groups(state):
            if isinstance(group._all_gather_comm, GatherApart):
                continue
            shapes = [(tuple(cut.sharded_param.shape), cut.sharded_param.dtype) for cut in group.fsdp_params]
            gathered = [cut.mp_policy.param_dtype for cut in group.fsdp_params]
            number = zlib.crc32(repr([shapes, gathered]).encode()) % MOST_SIZES
            shards = group._all_gather_process_group
            group._all_gather_comm = GatherApart(shards, world.group_beside(shards, f"units of size {number}"))
            world.close_before_end(group._all_gather_comm)


class GatherApart:
    """The all-gather of a unit in another process group than the one it is asked to use.

    Args:
        shards: the group of the mesh.
        apart: the one that takes its place.
    """

    def __init__(self, shards: ProcessGroup, apart: ProcessGroup) -> None:
        self._groups = {shards: apart}

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """The buffer for what is gathered."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        """Gathers, in the group that is given: the engine gathers again in a part of the mesh."""
        group = self._groups.get(group, group)
        return all_gather_single(output_tensor, input_tensor, group=group, async_op=async_op)

    def close(self) -> None:
        """Lets go of the groups: the model may outlive them."""
        self._groups = {}


def was_gathered(cuts: Iterable[Any]) -> bool:
    """Whether the tensors that parameters are gathered into have been made: they are made once."""
    return all(map(is_gathered_once, cuts))


def gather_as_stored(unit: nn.Module | list[nn.Module], modules: Set[nn.Module]) -> None:
    """Has a unit gather what any of some modules has in its own dtype, with all other parameters."""
    for group in param_groups(engine_state(unit[0] if isinstance(unit, list) else unit)):
        kept = [cut for cut in group.fsdp_params if not modules.isdisjoint(_owners(cut))]
        for cut in kept:
            cut.mp_policy = replace(cut.mp_policy, param_dtype=None)
        if not has_one_policy(group):
            continue
        if len(kept) == len(group.fsdp_params):
            group.mp_policy = replace(group.mp_policy, param_dtype=None)
        elif group.mp_policy.param_dtype is not None:
            SeveralDtypes(group, kept)


def engine_state(module: nn.Module) -> Any:
    """The engine's state of a sharded module; None for any other module."""
    from torch.distributed.fsdp import FSDPModule

    return module._get_fsdp_state() if isinstance(module, FSDPModule) else None


def _owners(cut: Any) -> list[nn.Module]:
    """The modules that have a parameter."""
    return [cut._module_info.module, *cut._module_info.shared_modules]


def _by_name(model: nn.Module, found: Iterable[tuple[Any, torch.Tensor]]) -> dict[str, torch.Tensor]:
    prefixes = {id(module): f"{name}." if name else "" for name, module in model.named_modules()}
    return {prefixes[id(cut._module_info.module)] + cut._module_info.param_name: tensor for cut, tensor in found}
