"""Whole windows by Megatron's schedules: no pipelining, 1F1B, interleaved 1F1B.

A micro-batch gives a *sum* and a *weight*, and the gradient is that of (sum of sums) / (sum of
weights) over the window and the data-parallel ranks. Weights are known on the last stage alone, and
all of them only at the end: each backward runs divided by a reference, the mean weight per rank of
the window before, and one factor corrects the gradients at the end, on all stages.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from accel_core import World
    from accel_megatron.model_engine import ModelEngine

LossFn = Callable[[Any, Any], tuple[torch.Tensor, "torch.Tensor | float"]]
Inputs = Callable[[Any], tuple[tuple[Any, ...], dict[str, Any]]]


class Schedule:
    """Runs windows of one model. A window is a collective over the ranks of its pipeline and data."""

    def __init__(self, engine: ModelEngine, world: World) -> None:
        self._engine = engine
        self._world = world
        self._reference: float | None = None

    def run(
        self,
        micro_batches: Iterable[Any],
        loss_fn: LossFn,
        inputs: Inputs,
        scale_loss: Callable[[torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        """See `Accelerator.forward_backward`; without gradients enabled, forwards alone."""
        batches = list(micro_batches)
        self._check_count(batches)
        engine, trains = self._engine, torch.is_grad_enabled()
        if not engine.inputs_checked:
            engine.check_inputs(*inputs(batches[0]))
        if not trains:
            mean, _ = self._run(batches, loss_fn, inputs, None)
            return mean
        if engine.holds_back:
            raise RuntimeError(
                "forward_backward() weighs a whole window, but gradients of backwards inside no_sync() wait to travel. Synchronise them, or "
                "drop them by optimizer.zero_grad()."
            )
        # Once per window, on all stages: losses are the last one's, but a scale changes on all together, and all have to learn of
        # a backward that adds to gradients which were unscaled before.
        scale = scale_loss(torch.ones((), device=self._world.device, requires_grad=True))
        engine.set_aside()
        try:
            mean, factor = self._run(batches, loss_fn, inputs, scale.detach())
            engine.scale(factor)
        except BaseException:
            engine.drop_window()  # half a window is none: the call may be repeated
            raise
        engine.bring_back()
        scale.backward()
        return mean

    def _check_count(self, batches: Sequence[Any]) -> None:
        config, count = self._engine.config, len(batches)
        if not count:
            raise ValueError(
                "forward_backward() was given no micro-batch, and a window has at least one. Leave the call out, on all ranks alike."
            )
        stages = getattr(config, "pipeline_model_parallel_size", 1)
        if getattr(config, "virtual_pipeline_model_parallel_size", None) and count % stages:
            raise ValueError(
                f"forward_backward() was given {count} micro-batches, but interleaved stages (virtual_pipeline) take them in rounds of "
                f"pipeline_parallel={stages}. Give a multiple of {stages}."
            )

    def _run(
        self,
        batches: list[Any],
        loss_fn: LossFn,
        inputs: Inputs,
        scale: torch.Tensor | None,
    ) -> tuple[torch.Tensor, float]:
        from megatron.core.pipeline_parallel import get_forward_backward_func

        parts: list[tuple[torch.Tensor, torch.Tensor | float]] = []
        count = len(batches)

        def forward_step(data: Iterator[Any], chunk: Any) -> tuple[Any, Callable[[Any], Any]]:
            batch = next(data)
            args, kwargs = inputs(batch)

            def loss_of(output: Any) -> tuple[torch.Tensor, dict[str, Any]]:
                loss, weight = _checked(loss_fn(output, batch))
                parts.append((loss.detach(), weight))
                if self._reference is None:
                    self._reference = self._mean_weight(self._total(parts)) or 1.0
                # Megatron divides by the number of micro-batches, which may be another one on each rank.
                return loss.to(torch.promote_types(loss.dtype, torch.float32)) * (count / self._reference), {}

            return chunk(*args, **kwargs), loss_of

        chunks = self._engine.chunks
        data = [iter(batches) for _ in chunks]
        rows, length, varies = _shape(batches, inputs)
        with self._configured(scale, varies):
            get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=data if len(chunks) > 1 else data[0],
                model=chunks if len(chunks) > 1 else chunks[0],
                num_microbatches=count,
                seq_length=length,
                micro_batch_size=rows,
                forward_only=not torch.is_grad_enabled(),
            )
        return self._settle(parts)

    def _settle(self, parts: list[tuple[torch.Tensor, torch.Tensor | float]]) -> tuple[torch.Tensor, float]:
        """The mean loss, and the factor for the gradients, the same on all ranks. A collective."""
        from megatron.core import parallel_state

        world, device = self._world, self._world.device
        told = torch.zeros(3, dtype=world.widest, device=device)
        if parts:
            loss, weight = self._total(parts)
            told = torch.tensor([loss, weight, self._reference or 1.0], dtype=world.widest, device=device)
        pipeline = parallel_state.get_pipeline_model_parallel_group()
        if pipeline.size() > 1:
            last = parallel_state.get_pipeline_model_parallel_last_rank()
            dist.broadcast(told, src=last, group=pipeline)
        loss, weight, reference = told.tolist()
        now = self._mean_weight((loss, weight))
        mean = torch.tensor(loss / weight if weight else math.nan, dtype=torch.float32, device=device)
        self._reference = now or reference
        return mean, reference / now if now else 1.0

    def _mean_weight(self, total: tuple[float, float]) -> float:
        from megatron.core import parallel_state

        # Megatron averages over context peers too, and multiplies the loss by their number.
        return total[1] / float(parallel_state.get_data_parallel_world_size())

    def _total(self, parts: list[tuple[torch.Tensor, torch.Tensor | float]]) -> tuple[float, float]:
        """Sums of losses and weights over this rank's parts, and the data-parallel ranks."""
        from megatron.core import parallel_state

        device, wide = self._world.device, self._world.widest
        losses = torch.stack([loss.to(device) for loss, _ in parts]).sum(dtype=wide)
        weights = torch.zeros_like(losses)
        for _, weight in parts:
            weights += weight.to(device, wide) if isinstance(weight, torch.Tensor) else weight
        total = torch.stack([losses, weights])
        dist.all_reduce(total, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
        loss, weight = total.tolist()
        return loss, weight

    @contextmanager
    def _configured(self, scale: torch.Tensor | None, varies: bool) -> Iterator[None]:
        """Gives Megatron what it calls in a schedule, and takes it away again."""
        engine, config = self._engine, self._engine.config
        holds = [chunk.no_sync for chunk in engine.chunks]
        given = {
            "grad_scale_func": None if scale is None else scale.mul,
            "finalize_model_grads_func": lambda _, __, **options: engine.finalize(**options),
            "no_sync_func": (holds if len(holds) > 1 else holds[0]) if engine.options.overlap_grad_reduce else None,
            "variable_seq_lengths": varies or config.variable_seq_lengths,
        }
        before = {name: getattr(config, name) for name in given}
        for name, value in given.items():
            setattr(config, name, value)
        try:
            yield
        finally:
            for name, value in before.items():
                setattr(config, name, value)


def _shape(batches: Sequence[Any], inputs: Inputs) -> tuple[int, int, bool]:
    """Rows and length of what stages send each other, and whether micro-batches differ in them."""
    found = []
    for batch in batches:
        args, kwargs = inputs(batch)
        tensors = (each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor) and each.dim() > 1)
        first = next(tensors, None)
        found.append((1, 1) if first is None else (first.shape[0], first.shape[1]))
    from megatron.core import parallel_state

    rows, length = found[0]
    return rows, length * parallel_state.get_context_parallel_world_size(), len(set(found)) > 1


def _checked(result: object) -> tuple[torch.Tensor, torch.Tensor | float]:
    if not (isinstance(result, tuple) and len(result) == 2):
        raise TypeError(
            f"loss_fn(output, batch) returned {type(result).__name__}, expected a tuple: the sum of losses, and its weight."
        )
    loss, weight = result
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        found = f"shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise ValueError(
            f"loss_fn(output, batch) returned a sum of {found}, expected a scalar tensor. Sum the loss: loss.sum()."
        )
    return loss.reshape(()), weight.detach().reshape(()) if isinstance(weight, torch.Tensor) else float(weight)
