"""Optimizers whose `fused_backward(loss, lr)` updates parameters in the backward, as LOMO's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch.optim import Optimizer

    from accel_core.loop.accumulation import Accumulation
    from accel_core.plugins.offers import Selected
    from accel_core.processes.world import World


def is_fused(optimizer: object) -> bool:
    """Whether an optimizer updates parameters in the backward: by a method `fused_backward`."""
    return callable(getattr(optimizer, "fused_backward", None))


def no_step(closure: object = None) -> None:
    """The `step` of such an optimizer, which has nothing left to do."""
    if closure is not None:
        what = "optimizer.step(closure) was called, but this optimizer steps during the backward and calls no closure."
        raise TypeError(f"{what} Call accelerator.backward(loss, learning_rate=...) instead.")


def fused_backward(
    loss: torch.Tensor,
    learning_rate: float | None,
    optimizers: Sequence[Optimizer],
    accumulation: Accumulation,
    world: World,
    owners: Mapping[str, Selected | None],
    options: Mapping[str, Any],
) -> None:
    """Runs the backward of a loss, in which the one prepared optimizer updates parameters."""
    fused: Any = next(filter(is_fused, optimizers), None)
    names = ", ".join(type(optimizer).__name__ for optimizer in optimizers)
    if fused is None:
        what = f"backward(learning_rate={learning_rate!r}) was called, but no prepared optimizer updates parameters"
        raise TypeError(f"{what} during the backward; prepared: {names or 'none'}. Leave learning_rate out.")
    asked = f"backward() was called, and {type(fused).__name__} updates parameters during the backward."
    if len(optimizers) > 1:
        raise RuntimeError(f"{asked} It is one of several ({names}). Give each an Accelerator of its own.")
    if world.size > 1:
        when = "at the end of the backward, after the update"
        raise RuntimeError(f"{asked} In a world of {world.size} ranks gradients are averaged {when}.")
    if accumulation.steps > 1:
        given = f"gradient_accumulation_steps={accumulation.steps}"
        raise RuntimeError(f"{asked} With {given} nothing would be accumulated.")
    for hook in ("scale_loss", "backward", "optimizer_step", "apply_step"):
        if (owner := owners[hook]) is not None:
            told = f"{asked} The hook {hook!r} is taken over by {owner.describe()}, and would be missed."
            raise RuntimeError(f"{told} Use mixed_precision='bf16' or 'no', and strategy='single'.")
    if learning_rate is None or options:
        raise TypeError(
            f"{asked} That takes a loss and learning_rate=, such as scheduler.get_last_lr()[0], and no more."
        )
    accumulation.count_backward()
    fused.fused_backward(loss, learning_rate)


def refuse(call: str, optimizers: Sequence[Optimizer]) -> None:
    """Raises where a call needs gradients, and a fused optimizer has used them up."""
    fused = next(filter(is_fused, optimizers), None)
    if fused is not None:
        what = f"{call} was called, but {type(fused).__name__} updates each parameter during the backward, and its"
        raise RuntimeError(f"{what} gradient is gone then. Use accelerator.backward(loss, learning_rate=...) alone.")


def refuse_detection(optimizer: Optimizer) -> None:
    """Raises for a fused optimizer: its backward changes parameters, so cannot be repeated."""
    if is_fused(optimizer):
        what = f"Accelerator(detect_nonfinite=True) was asked for, but {type(optimizer).__name__} updates parameters"
        raise ValueError(f"{what} during the backward, so a window that went wrong cannot be repeated. Leave it out.")
