"""The first steps of a strategy with a model: its comparison over the ranks, and its placement."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn.parameter import is_lazy

from accel_core.contract.precision_policy import cast_parameters, override_calls
from accel_core.loop.compilation import compile_calls

if TYPE_CHECKING:
    from torch import nn

    from accel_core.loop.preparation import PrepareRequest
    from accel_core.processes.world import World


def check_alike(model: nn.Module, world: World) -> None:
    """Raises `CollectiveMismatchError` on all ranks if a model differs over them. A collective."""
    if world.size == 1:
        return
    from accel_core.processes.mismatch_report import describe

    frozen = {name: " (frozen)" for name, parameter in model.named_parameters() if not parameter.requires_grad}
    leaves = tuple(
        (f"{name}{frozen.get(name, '')}", tensor.dtype, ("*",) if is_lazy(tensor) else tuple(tensor.shape))
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
    )
    channel = world.channel()
    channel.exchange(channel.letter(leaves, lambda: describe("prepare()", "", leaves)), ())


def place_model(model: nn.Module, request: PrepareRequest) -> None:
    """Moves, casts and compiles a model in place, as requested; parameters stay the same objects.

    All of the policy holds from here on but `reduce`, which is up to the strategy.
    """
    if request.device is not None:
        _move(model, request.device)
    cast_parameters(model, request.policy)
    override_calls(model, request.policy, request.device_type, request.autocast)
    if request.compile_options is not None:
        compile_calls(model, request.compile_options)


def _move(model: nn.Module, device: torch.device) -> None:
    """`model.to(device)` that keeps parameters where torch by itself would replace them."""
    before = torch.__future__.get_swap_module_params_on_conversion()
    sources = {parameter.device for parameter in model.parameters()}
    target = torch.empty(0, device=device)
    fits = all(torch._has_compatible_shallow_copy_type(torch.empty(0, device=source), target) for source in sources)
    torch.__future__.set_swap_module_params_on_conversion(before or not fits)
    try:
        model.to(device)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)
