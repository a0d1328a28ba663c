"""The norm of gradients of which each rank has parts, and clipping by it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from accel_core import World

_EPSILON = 1e-6  # as in torch.nn.utils.clip_grads_with_norm_


@torch.no_grad()
def clip(
    parts: Sequence[torch.Tensor],
    whole: Sequence[torch.Tensor],
    max_norm: float,
    norm_type: float,
    device: torch.device,
    group: ProcessGroup | None,
    note: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales gradients in place so that their joint norm is at most `max_norm`. A collective.

    Args:
        parts: what this rank has of gradients that are shared out, each element on one rank.
        whole: gradients that are the same on all ranks.
        max_norm: infinite: nothing is scaled.
        norm_type: 2 is the Euclidean norm, `inf` the largest element; any positive number is
            possible.
        device: on which ranks communicate.
        group: see `group_of`.
        note: a number that the ranks tell each other on the way; its last 52 bits.

    Returns:
        The norm before, 0-d, in single precision; and what was gathered: for each rank the power of
        its parts, and its note.

    Raises:
        ValueError: for a `norm_type` that is not positive.
    """
    if not norm_type > 0:
        raise ValueError(
            f"clip_grad_norm_(norm_type={norm_type}) was asked for under DeepSpeed, which sums powers over the ranks: expected a positive "
            f"number, or math.inf for the largest element. Leave norm_type out for the Euclidean norm."
        )
    gathered = gather(power(parts, norm_type, device), note, group)
    powers = gathered[:, 0]
    if whole:
        powers = torch.cat([powers, power(whole, norm_type, device).view(1)])
    norm = (powers.max() if math.isinf(norm_type) else powers.sum() ** (1.0 / norm_type)).float()
    if not math.isinf(max_norm):
        factor = torch.clamp(max_norm / (norm + _EPSILON), max=1.0)
        by_device: dict[torch.device, list[torch.Tensor]] = {}
        for gradient in (*parts, *whole):
            by_device.setdefault(gradient.device, []).append(gradient)
        for place, gradients in by_device.items():
            torch._foreach_mul_(gradients, factor.to(place))
    return norm, gathered


def gather(power: torch.Tensor, note: int, group: ProcessGroup | None) -> torch.Tensor:
    """Each rank's power and note, a row each, float64. A collective of a group of `group_of`."""
    own = torch.tensor([0.0, note % 2**52], dtype=torch.float64, device=power.device)
    own[0] = power
    if group is None:
        return own.view(1, 2)
    found = own.new_empty(2 * group.size())
    dist.all_gather_single(found, own, group=group)
    return found.view(-1, 2)


def group_of(world: World) -> ProcessGroup | None:
    """The group for exchanging powers; None in a world of one. A collective, the first time."""
    if world.size == 1:
        return None
    group = world.subgroup(range(world.size))
    # gloo ends the process of a rank that is in another collective, of another size, in the same group.
    return world.group_beside(group, "clipping") if world.device.type == "cpu" else group


def power(gradients: Sequence[torch.Tensor], norm_type: float, device: torch.device) -> torch.Tensor:
    """The sum of the powers of all elements, in double precision; or the largest."""
    filled = [gradient for gradient in gradients if gradient.numel()]
    if not filled:
        return torch.zeros((), dtype=torch.float64, device=device)
    norms = torch.stack(
        [norm.to(device) for norm in torch._foreach_norm(filled, norm_type, dtype=torch.float32)]
    ).double()
    return norms.max() if math.isinf(norm_type) else norms.pow(norm_type).sum()
