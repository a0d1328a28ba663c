"""A strategy in a distribution of its own: the stages of a pipeline, which torch.distributed.pipelining runs.

stage    a rank's layers, under their names in the whole model
window   forwards and backwards of a window
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from accel_checkpoint import Whole, capture_model, capture_optimizer, list_misfits, restore_optimizer
from accel_core import Layout, PrepareRequest, Shard, Strategy, World, hookimpl, load_checkpoint_in_model, place_model
from accel_core.api.layouts import Elementwise, State
from accel_pipeline.stage import PreparedStage, Stage
from accel_pipeline.window import SCHEDULES, run_window

if TYPE_CHECKING:
    from accel_core.api.checkpoint import OptimizerState, SavedOptimizer

__all__ = ["Pipeline", "Stage"]


class Pipeline(Strategy):
    """Each process has a stage of the model, and all read the same data.

    The model is an `nn.Sequential` that `accelerator.build_model(factory)` cuts, its layers are on one process each, and
    `accelerator.forward_backward` trains it. Full precision only.

    Args:
        schedule: "1f1b" or "gpipe". See Narayanan et al., arXiv:1806.03377, and Huang et al., arXiv:1811.06965.

    Raises:
        ValueError: for another schedule.
    """

    replicates_parameters = False

    def __init__(self, schedule: str = "1f1b") -> None:
        if schedule not in SCHEDULES:
            raise ValueError(f"Pipeline(schedule={schedule!r}): expected one of {', '.join(SCHEDULES)}.")
        self._schedule = schedule
        self._world: World
        self._stages: weakref.WeakSet[Stage] = weakref.WeakSet()

    @hookimpl
    def layout(self, world: World) -> Layout:
        """All ranks read all of the data; each is alone in its group of data-parallel ranks. A collective."""
        self._world = world
        self._group = world.subgroup(range(world.size))  # a world of one has no group before
        alone = [world.subgroup([rank]) for rank in range(world.size)]
        return Layout(Shard(0, 1), alone[world.rank])

    @hookimpl
    def build_model(self, factory: Callable[[], nn.Module], checkpoint: Path | None) -> nn.Module:
        """This rank's stage, with the weights of rank 0 or of the checkpoint. A collective."""
        model = factory()
        if checkpoint is not None:
            load_checkpoint_in_model(model, checkpoint)
        for tensor in (*model.parameters(), *model.buffers()):
            dist.broadcast(tensor.detach(), src=0, group=self._group)
        return Stage(model, self._world.rank, self._world.size)

    @hookimpl
    def prepare_model(self, model: nn.Module, optimizers: Sequence[Optimizer], request: PrepareRequest) -> nn.Module:
        """Places a stage. Raises for any other model, and for a policy other than full precision."""
        if isinstance(model, PreparedStage):
            return model
        if not isinstance(model, Stage):
            raise ValueError(
                f"prepare() was given a {type(model).__name__}, and strategy 'pipeline' trains what accelerator.build_model(factory) returned."
            )
        if any(vars(request.policy).values()):
            raise ValueError(f"strategy 'pipeline' computes in full precision, and {request.policy} was asked for.")
        place_model(model, request)
        self._stages.add(model)
        return PreparedStage(model)

    @hookimpl
    def no_sync(self, model: nn.Module) -> contextlib.AbstractContextManager[None]:
        """Nothing travels but between stages."""
        return contextlib.nullcontext()

    @hookimpl
    def trigger_sync_in_backward(self, model: nn.Module) -> contextlib.AbstractContextManager[None]:
        """As for `no_sync`."""
        return contextlib.nullcontext()

    @hookimpl
    def backward(self, loss: torch.Tensor, weight: float, options: dict[str, Any]) -> None:
        """Raises `RuntimeError` with several stages: their backwards are those of a window."""
        if self._world.size > 1:
            raise RuntimeError(
                "accelerator.backward(loss) was called, but this rank has one stage of a pipeline. Call "
                "accelerator.forward_backward(model, micro_batches, loss_fn) for a whole window."
            )
        (loss * weight).backward(**options)

    @hookimpl
    def forward_backward(
        self, model: nn.Module, micro_batches: Iterable[Any], loss_fn: Any, inputs: Any, scale_loss: Any
    ) -> torch.Tensor:
        """A window by the schedule; without gradients enabled, its forwards alone."""
        assert isinstance(model, PreparedStage), "prepare_model returned it"
        return run_window(
            model.module, self._world, self._group, self._schedule, micro_batches, loss_fn, inputs, scale_loss
        )

    @hookimpl
    def clip_gradients(self, parameters: Sequence[nn.Parameter], max_norm: float, norm_type: float) -> torch.Tensor:
        """By the norm over all stages. A collective."""
        gradients = [each.grad for each in parameters if each.grad is not None]
        own = torch.nn.utils.get_total_norm(gradients, norm_type).to(self._world.device, torch.float64)
        is_largest = norm_type == float("inf")
        total = own if is_largest else own**norm_type
        dist.all_reduce(total, dist.ReduceOp.MAX if is_largest else dist.ReduceOp.SUM, group=self._group)
        norm = (total if is_largest else total ** (1 / norm_type)).float()
        torch.nn.utils.clip_grads_with_norm_(list(parameters), max_norm, norm)
        return norm

    @hookimpl
    def model_state(self, model: nn.Module) -> State:
        """The layers on this rank, and the names of those elsewhere."""
        assert isinstance(model, Stage), "prepare_model took no other"
        found = capture_model(model, Whole())
        return {name: found.get(name, Elementwise(*form, ())) for name, form in model.forms.items()}

    @hookimpl
    def optimizer_state(self, optimizer: Optimizer, names: Mapping[int, str]) -> OptimizerState:
        """The state of the parameters on this rank."""
        return capture_optimizer(optimizer, names, Whole())

    @hookimpl
    def optimizer_misfits(self, optimizer: Optimizer, names: Mapping[int, str], saved: SavedOptimizer) -> list[str]:
        """See `accel_checkpoint.list_misfits`; parameters of other stages are stepped there."""
        first = {stage: names[id(next(stage.parameters()))] for stage in self._stages}
        elsewhere = {f"{name.partition('.')[0]}.{other}" for stage, name in first.items() for other in stage.forms}
        return list_misfits(optimizer, names, Whole(), saved, elsewhere)

    @hookimpl
    def load_optimizer_state(self, optimizer: Optimizer, names: Mapping[int, str], saved: SavedOptimizer) -> None:
        """Reads the state of the parameters on this rank."""
        restore_optimizer(optimizer, names, Whole(), saved)
