"""Optimizers that update each parameter during the backward, as soon as its gradient is there.

The gradients of a model never exist all at once, which saves as much memory as the parameters take.
LOMO (Lv et al., "Full Parameter Fine-tuning for Large Language Models with Limited Resources",
2023) and AdaLomo are such optimizers. They are known by one method, `fused_backward(loss, lr)`: it
runs the backward, and the parameters are new when it returns.

Whatever comes between the backward and the step elsewhere has no place here: accumulation,
unscaling, clipping, averages over ranks. Each of these raises and says so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch.optim import Optimizer

    from accel_core.loop.accumulation import Accumulation
    from accel_core.plugins.selection import Selected
    from accel_core.processes.world import World


def is_fused(optimizer: object) -> bool:
    """Whether an optimizer updates parameters during the backward: it has a method `fused_backward`."""
    return callable(getattr(optimizer, "fused_backward", None))


def no_step(closure: object = None) -> None:
    """The `step` of such an optimizer, which has nothing left to do."""
    if closure is not None:
        raise TypeError(
            "optimizer.step(closure) was called, but this optimizer steps during the backward, so nothing would call the "
            "closure. Call accelerator.backward(loss, learning_rate=...) instead."
        )


def fused_backward(
    loss: torch.Tensor,
    learning_rate: float | None,
    optimizers: Sequence[Optimizer],
    accumulation: Accumulation,
    world: World,
    owners: Mapping[str, Selected | None],
    options: Mapping[str, Any],
) -> None:
    """Runs the backward of a loss, and updates the parameters meanwhile.

    Args:
        loss: a scalar.
        learning_rate: of this update.
        optimizers: all that are prepared; exactly one, and a fused one.
        accumulation: the window, of one micro-batch.
        world: of one process.
        owners: by hook, which component owns it, None for the core.
        options: further arguments of `backward`; none can be passed on.

    Raises:
        TypeError: if there is a learning rate and no such optimizer, or the reverse; for options.
        RuntimeError: where the update could not be right.
    """
    optimizer: Any = _only(optimizers, learning_rate)
    _check_learning_rate(learning_rate, optimizer)
    name = type(optimizer).__name__
    if options:
        raise TypeError(
            f"backward({', '.join(f'{option}=...' for option in options)}) was called with learning_rate=, but the backward "
            f"of {name} takes a loss and a learning rate. Leave the other arguments out."
        )
    reason = _obstacle(accumulation, world, owners)
    if reason is not None:
        raise RuntimeError(
            f"backward(learning_rate=...) was called, and {name} updates parameters during the backward. {reason}"
        )
    accumulation.count_backward()
    optimizer.fused_backward(loss, learning_rate)


def refuse(call: str, optimizers: Sequence[Optimizer]) -> None:
    """Raises where a call needs gradients, and a fused optimizer has used them up."""
    fused = next((optimizer for optimizer in optimizers if is_fused(optimizer)), None)
    if fused is not None:
        raise RuntimeError(
            f"{call} was called, but {type(fused).__name__} updates each parameter during the backward, and its gradient is "
            f"gone when that returns. Leave the call out, and use accelerator.backward(loss, learning_rate=...); what the "
            f"optimizer offers instead, such as clipping, are arguments of its own."
        )


def refuse_detection(optimizer: Optimizer) -> None:
    """Raises for a fused optimizer: a backward cannot be repeated once it has changed the parameters."""
    if is_fused(optimizer):
        raise ValueError(
            f"Accelerator(detect_nonfinite=True) was asked for, but {type(optimizer).__name__} updates parameters during the "
            f"backward, so a window that went wrong cannot be repeated. Leave detect_nonfinite out, or search with another "
            f"optimizer."
        )


def _only(optimizers: Sequence[Optimizer], learning_rate: float | None) -> Optimizer:
    names = ", ".join(type(optimizer).__name__ for optimizer in optimizers) or "none"
    if not any(map(is_fused, optimizers)):
        raise TypeError(
            f"backward(learning_rate={learning_rate!r}) was called, but no prepared optimizer updates parameters during the "
            f"backward; prepared: {names}. Leave learning_rate out, or prepare an optimizer that has a method `fused_backward`."
        )
    if len(optimizers) > 1:
        raise RuntimeError(
            f"backward() was called, and one of several prepared optimizers updates parameters during the backward: {names}. "
            f"Which of them a loss is for, and how that one has scaled it, cannot be known. Call accelerator.free_memory() "
            f"before the next optimizer is prepared, or give each of them an Accelerator of its own."
        )
    return optimizers[0]


def _check_learning_rate(learning_rate: object, optimizer: Optimizer) -> None:
    if isinstance(learning_rate, (int, float)) and not isinstance(learning_rate, bool):
        return
    found = "no learning_rate" if learning_rate is None else f"learning_rate={learning_rate!r}"
    raise TypeError(
        f"backward() was called with {found}, but {type(optimizer).__name__} updates parameters during the backward and needs "
        f"a number. Call accelerator.backward(loss, learning_rate=1e-3), or with scheduler.get_last_lr()[0]."
    )


def _obstacle(accumulation: Accumulation, world: World, owners: Mapping[str, Selected | None]) -> str | None:
    """The reason why the update would be wrong, and what to do; None if it is right."""
    if world.size > 1:
        return (
            f"In a world of {world.size} ranks gradients are averaged at the end of the backward, after the update, so the "
            f"ranks would drift apart. Train in one process, or choose an optimizer that steps after the backward."
        )
    if accumulation.steps > 1:
        return (
            f"With gradient_accumulation_steps={accumulation.steps} nothing would be accumulated: each micro-batch makes an "
            f"update of its own. Use gradient_accumulation_steps=1 and larger batches."
        )
    for hook in ("scale_loss", "backward", "optimizer_step", "apply_step"):
        owner = owners[hook]
        if owner is not None:
            return (
                f"The hook {hook!r} is taken over by {owner.describe()}, and what it does to the loss or at the step "
                f"would be missed. Use mixed_precision='bf16' or 'no', and strategy='single'."
            )
    return None
