"""One window of micro-batches through the stages, by a schedule of torch.distributed.pipelining.

A micro-batch gives a sum and a weight, on the last stage alone. Gradients are those of the sums until the end of the window, where
all stages learn the weights, and divide by their sum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

if TYPE_CHECKING:
    from accel_core import World
    from accel_pipeline.stage import Stage

SCHEDULES: dict[str, Any] = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}

LossFn = Callable[[Any, Any], tuple[torch.Tensor, "torch.Tensor | float"]]
Inputs = Callable[[Any], tuple[tuple[Any, ...], dict[str, Any]]]


def run_window(
    model: Stage,
    world: World,
    group: dist.ProcessGroup,
    schedule: str,
    micro_batches: Iterable[Any],
    loss_fn: LossFn,
    inputs: Inputs,
    scale_loss: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """The mean loss of the window, on all ranks; gradients are added to what was there. A collective."""
    batches = list(micro_batches)
    if not batches:
        raise ValueError("forward_backward() was given no micro-batch. Leave the call out, on all ranks alike.")
    trains = torch.is_grad_enabled()
    before = {parameter: parameter.grad for parameter in model.parameters()}
    for parameter in before:
        parameter.grad = None
    try:
        parts = _run(model, world, group, schedule if trains else "gpipe", batches, loss_fn, inputs, scale_loss)
        total = torch.zeros(2, dtype=torch.float64, device=world.device)
        for loss, weight in parts:
            total += torch.stack([loss.double(), torch.as_tensor(weight, dtype=torch.float64, device=world.device)])
        dist.broadcast(total, src=world.size - 1, group=group)
        for parameter, earlier in before.items() if trains else ():
            if parameter.grad is not None:
                parameter.grad /= total[1].to(parameter.grad.dtype).clamp_min(torch.finfo(parameter.grad.dtype).tiny)
                if earlier is not None:
                    parameter.grad += earlier
    except BaseException:
        for parameter in before:
            parameter.grad = None  # half a window is none: the call may be repeated
        raise
    finally:
        for parameter, earlier in before.items():
            if parameter.grad is None:
                parameter.grad = earlier
    return (total[0] / total[1]).float()


def _run(
    model: Stage,
    world: World,
    group: dist.ProcessGroup,
    schedule: str,
    batches: list[Any],
    loss_fn: LossFn,
    inputs: Inputs,
    scale_loss: Callable[[torch.Tensor], torch.Tensor],
) -> list[tuple[torch.Tensor, torch.Tensor | float]]:
    """Forwards and, with gradients enabled, backwards; the sums and weights, which the last stage has."""
    parts: list[tuple[torch.Tensor, torch.Tensor | float]] = []
    called = [inputs(batch) for batch in batches]
    if any(kwargs for _, kwargs in called) or len({args[0].shape for args, _ in called}) > 1:
        raise ValueError(
            "forward_backward() was given micro-batches with keyword arguments, or of several shapes. Stages of 'pipeline' take one tensor, "
            "of one shape in a window: pass inputs=…, and pad, or leave the last batch out (drop_last=True)."
        )

    def loss_of(output: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
        if is_learning:  # torch looks at the form of a loss before the first micro-batch, which must not be counted
            return output.sum()
        loss, weight = loss_fn(output, batches[int(number)])
        parts.append((loss.detach(), weight))
        return scale_loss(loss)

    args = [each if world.rank == 0 else () for each, _ in called]
    # A new one for each window: windows may differ in number and shape of their micro-batches.
    stage = PipelineStage(model, world.rank, world.size, world.device, group=group)
    runs = SCHEDULES[schedule](stage, len(batches), loss_fn=loss_of, scale_grads=False)
    # `step` cuts one batch into equal parts; below it, in torch 2.13, micro-batches come as they are.
    runs._has_backward = stage.has_backward = torch.is_grad_enabled()
    stage.clear_runtime_states()
    is_learning = True
    numbers = list(torch.arange(len(batches)))  # targets are tensors, and batches need not be
    runs._initialize_stage(args[0], {}, numbers[0])
    is_learning = False
    runs._step_microbatches(args, [{}] * len(batches), numbers, None)
    return parts
