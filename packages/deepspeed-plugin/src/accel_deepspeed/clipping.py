"""The norm of gradients of which each rank has parts, and scaling by it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from accel_core.api.component import all_gather_single

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from accel_core import World

_EPSILON = 1e-6  # as in torch.nn.utils.clip_grads_with_norm_
_ROW = 1024  # elements that are summed up in single precision: over 10^8 of them a norm on a CPU is 1 % off


@torch.no_grad()
def joint_norm(
    parts: Sequence[torch.Tensor],
    whole: Sequence[torch.Tensor],
    norm_type: float,
    device: torch.device,
    group: ProcessGroup | None,
    note: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The norm of all gradients. A collective.

    Args:
        parts: what this rank has of gradients that are shared out, each element on one rank.
        whole: gradients that are the same on all ranks.
        norm_type: 2 is the Euclidean norm, `inf` the largest element; any positive number is
            possible.
        device: on which ranks communicate.
        group: see `group_of`.
        note: a number that the ranks tell each other on the way; its last 52 bits.

    Returns:
        The norm, 0-d, in single precision; and what was gathered: for each rank the power of its
        parts, and its note.

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
    return (powers.max() if math.isinf(norm_type) else powers.sum() ** (1.0 / norm_type)).float(), gathered


def factor(norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    """By what gradients of a norm are to be multiplied, so that it is at most `max_norm`; 0-d."""
    return 1.0 / torch.clamp((norm + _EPSILON) / max_norm, min=1.0)


@torch.no_grad()
def scale(gradients: Iterable[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiplies gradients in place."""
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for gradient in gradients:
        by_device.setdefault(gradient.device, []).append(gradient)
    for place, those in by_device.items():
        torch._foreach_mul_(those, factor.to(place))


def gather(power: torch.Tensor, note: int, group: ProcessGroup | None) -> torch.Tensor:
    """Each rank's power and note, a row each, float64. A collective of a group of `group_of`."""
    own = torch.tensor([0.0, note % 2**52], dtype=torch.float64, device=power.device)
    own[0] = power
    if group is None:
        return own.view(1, 2)
    found = own.new_empty(2 * group.size())
    all_gather_single(found, own, group=group)
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
    norms = [norm.to(device) for gradient in gradients for norm in _norms_of_rows(gradient, norm_type)]
    if not norms:
        return torch.zeros((), dtype=torch.float64, device=device)
    joined = torch.cat(norms).double()
    return joined.max() if math.isinf(norm_type) else joined.pow(norm_type).sum()


def _norms_of_rows(gradient: torch.Tensor, norm_type: float) -> Iterator[torch.Tensor]:
    flat, rest = gradient.reshape(-1), gradient.numel() % _ROW
    for rows in (flat[: flat.numel() - rest].view(-1, _ROW), flat[flat.numel() - rest :].view(1, -1)):
        if rows.numel():
            yield torch.linalg.vector_norm(rows, norm_type, dim=1, dtype=torch.float32)
