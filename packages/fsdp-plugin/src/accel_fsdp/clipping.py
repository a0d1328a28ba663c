"""The norm of gradients that are cut, whole, or both, over any meshes; and clipping by it.

torch's own functions take gradients of one mesh only: a model with tensor parallelism, or with
parameters that are kept whole, has several. So each rank takes the norm of what it has, in single
precision at least, and the powers are added up over the ranks among which the parameters are cut,
once for each way to cut them. Replicas count once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import reduce
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from accel_core import World
from accel_fsdp.sharding import is_sharded, local_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_EPSILON = 1e-6  # as in torch.nn.utils.clip_grads_with_norm_

Axes = tuple["ProcessGroup", ...]


@torch.no_grad()
def total_norm(gradients: Iterable[torch.Tensor], norm_type: float) -> torch.Tensor:
    """The norm of gradients, taken as one vector. A collective over the meshes in which they lie.

    Args:
        gradients: DTensors of any meshes, and plain tensors, which are the same on all ranks.
            Complex numbers count by their magnitudes.
        norm_type: 2 is the Euclidean norm, `inf` the largest element; any positive number is
            possible.

    Returns:
        A plain 0-d tensor on the device of the first gradient, in its dtype but real, and in single
        precision at least; 0 of no gradients.

    Raises:
        ValueError: for a `norm_type` that is not positive.
    """
    if not norm_type > 0:
        raise ValueError(
            f"clip_grad_norm_(norm_type={norm_type}) was asked for under FSDP, which sums powers over the ranks: expected a positive "
            f"number, or math.inf for the largest element. Leave norm_type out for the Euclidean norm."
        )
    by_axes: dict[Axes, list[torch.Tensor]] = {}
    for gradient in gradients:
        local = local_of(gradient)
        by_axes.setdefault(_axes(gradient), []).append(local.abs() if local.is_complex() else local)
    if not by_axes:
        return torch.tensor(0.0)
    first = next(iter(by_axes.values()))[0]
    parts = [_summed(_power(locals_, norm_type, first.device), axes, norm_type) for axes, locals_ in by_axes.items()]
    together = torch.stack(parts)
    total = together.max() if math.isinf(norm_type) else together.sum() ** (1.0 / norm_type)
    return total.to(torch.promote_types(first.dtype, torch.float32))


@torch.no_grad()
def clip(
    parameters: Sequence[torch.Tensor], max_norm: float, norm_type: float, pending: Sequence[torch.Tensor] = ()
) -> torch.Tensor:
    """Scales gradients so that their joint norm is at most `max_norm`. Collective.

    Args:
        parameters: their `.grad` is scaled.
        max_norm: infinite: nothing is.
        norm_type: as for `total_norm`.
        pending: further gradients that count in the norm, and are not scaled.

    Returns:
        The norm before, as `total_norm` gives it.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm = total_norm([*gradients, *pending], norm_type)
    if math.isinf(max_norm):
        return norm  # nothing is larger; and infinity over an infinite norm would be no number
    factor = torch.clamp(max_norm / (norm + _EPSILON), max=1.0)
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for gradient in gradients:
        local = local_of(gradient)
        by_device.setdefault(local.device, []).append(local)
    for device, locals_ in by_device.items():
        torch._foreach_mul_(locals_, factor.to(device))
    return norm


def _axes(gradient: Any) -> Axes:
    """The groups of ranks among which a gradient is cut."""
    if not is_sharded(gradient):
        return ()
    mesh = gradient.device_mesh
    cut = (number for number, placement in enumerate(gradient.placements) if not placement.is_replicate())
    return tuple(mesh.get_group(number) for number in cut if mesh.size(number) > 1)


def _power(locals_: Sequence[torch.Tensor], norm_type: float, device: torch.device) -> torch.Tensor:
    """The sum of the powers of all elements on this rank, in the `widest` dtype; or the largest."""
    filled = [local for local in locals_ if local.numel()]
    if not filled:
        return torch.zeros((), dtype=World.current().widest, device=device)
    dtype = reduce(torch.promote_types, {local.dtype for local in filled}, torch.float32)
    norms = torch._foreach_norm(filled, norm_type, dtype=dtype)
    together = torch.stack([norm.to(device) for norm in norms]).to(World.current().widest)
    return together.max() if math.isinf(norm_type) else together.pow(norm_type).sum()


def _summed(power: torch.Tensor, axes: Axes, norm_type: float) -> torch.Tensor:
    operation = dist.ReduceOp.MAX if math.isinf(norm_type) else dist.ReduceOp.SUM
    if not axes:
        return power
    world = World.current()
    # Parts may lie in the memory of the host, and the groups know the device alone.
    number = power.to(world.device, world.widest)
    for group in axes:
        # gloo ends the process of a rank that is in another reduction, of another size, in the same group.
        own = world.group_beside(group, "clipping") if number.device.type == "cpu" else group
        dist.all_reduce(number, operation, group=own)
    return number.to(power)
