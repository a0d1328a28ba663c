"""ZeRO over DeepSpeed's engines, under the user's own loop.

Stage 1 shares out the state of optimizers among the processes, stage 2 gradients as well, stage 3
parameters as well; stage 0 averages gradients, as DDP does. See Rajbhandari et al., "ZeRO: Memory
Optimizations Toward Training Trillion Parameter Models", arXiv:1910.02054.

The loop stays the user's: it says where a window ends, clips, steps and schedules. Each model has an
engine of its own, so there may be any number of them.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import torch

from accel_core import SKIPPED, DistributedType, Layout, Strategy, hookimpl, place_model
from accel_core.api.layouts import Elementwise
from accel_core.api.strategy import check_alike
from accel_deepspeed import clipping, optimizer_double
from accel_deepspeed.model_engine import ModelEngine, live_engines
from accel_deepspeed.prepared_model import NoSync, PreparedModel, engine_of, set_engine
from accel_deepspeed.sharding import ZeroSharding

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from accel_core import PrepareRequest, World
    from accel_core.api.checkpoint import OptimizerState, SavedOptimizer
    from accel_core.api.layouts import GradientState, State

_NOTHING = contextlib.nullcontext()


class DeepSpeed(Strategy):
    """ZeRO: optimizer state, gradients and parameters are shared out among the processes.

    Args:
        zero_stage: what is shared out: 0 nothing, 1 the state of optimizers, 2 gradients as well, 3
            parameters as well.
    """

    distributed_type = DistributedType.DEEPSPEED.value
    forward_is_collective = True

    def __init__(self, zero_stage: int = 2) -> None:
        self._stage = zero_stage
        self._world_or_none: World | None = None
        self._prepared: weakref.WeakKeyDictionary[nn.Module, PrepareRequest] = weakref.WeakKeyDictionary()

    @hookimpl
    def layout(self, world: World) -> Layout:
        """Pure data parallelism."""
        self._world_or_none = world
        return Layout.data_parallel(world)

    @hookimpl
    def prepare_model(self, model: nn.Module, optimizers: Sequence[Optimizer], request: PrepareRequest) -> nn.Module:
        """Places the model and wraps it, unless it is frozen or only evaluated; its engine is made when its optimizer is known."""
        if isinstance(model, PreparedModel):
            return model
        trains = not request.evaluation and any(parameter.requires_grad for parameter in model.parameters())
        if not trains:
            place_model(model, request)
            return model
        check_alike(model, self._world)
        place_model(model, request)
        prepared = PreparedModel(model, self._stage == 3)
        self._prepared[prepared] = request
        if optimizers:
            self._make_engine(prepared, optimizers)
        return prepared

    @hookimpl
    def check_optimizer(self, optimizer: Optimizer) -> None:
        """Makes the engines of the models that it steps. Raises for an optimizer that ZeRO cannot step."""
        held = {id(each) for group in optimizer.param_groups for each in group["params"]}
        for prepared in list(self._prepared):
            if engine_of(prepared) is None and any(id(each) in held for each in prepared.parameters()):
                self._make_engine(prepared, [optimizer])

    @hookimpl
    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Backwards of forwards inside keep their gradients, whole, on each rank."""
        return NoSync(model) if isinstance(model, PreparedModel) else _NOTHING

    @hookimpl
    def trigger_sync_in_backward(self, model: nn.Module) -> AbstractContextManager[None]:
        """The next backward synchronises, although its forward ran inside `no_sync`."""
        engine = engine_of(model)
        return _NOTHING if engine is None else _synchronised(engine)

    @hookimpl
    def backward(self, loss: torch.Tensor, weight: float, options: dict[str, Any]) -> None:
        """Runs the backward, and the engines of all models through which the loss came."""
        engines = live_engines()
        for engine in engines:
            engine.expect_backward()
        failed = True
        try:
            _run_backward(loss, weight, options)
            failed = False
        finally:
            for engine in engines:
                engine.end_backward(failed)

    @hookimpl
    def check_gradients(self, optimizer: Optimizer) -> None:
        """Raises for gradients that no backward has sent."""
        held = {id(each) for group in optimizer.param_groups for each in group["params"]}
        for prepared in self._prepared:
            engine = engine_of(prepared)
            if engine is None or not engine.holds_back:
                continue
            left = [name for name, each in engine.model.named_parameters() if each.grad is not None and id(each) in held]
            if left:
                raise RuntimeError(
                    f"{type(optimizer).__name__}.step() was called while {type(engine.model).__name__} holds back gradients of {len(left)} of "
                    f"its parameters, {left[0]!r} for one, which no backward has sent to the other ranks. Whether gradients travel is "
                    f"decided where the model is called: call it outside no_sync() for the last backward before the step; or put that "
                    f"backward into accelerator.trigger_sync_in_backward(model)."
                )

    @hookimpl
    def gradient_state(self, model: nn.Module, prepared: nn.Module) -> GradientState:
        """The parts on this rank, and whole local gradients that were not sent."""
        engine = engine_of(prepared)
        if engine is not None:
            return engine.gradient_state()
        named = model.named_parameters()
        return {name: [Elementwise.whole(each.grad)] for name, each in named if each.grad is not None}

    @hookimpl
    def clip_gradients(self, parameters: Sequence[nn.Parameter], max_norm: float, norm_type: float) -> torch.Tensor:
        """By the norm over all parts. A collective."""
        parts, whole = [], []
        for parameter in {id(each): each for each in parameters}.values():
            engine = self._engine_of(parameter)
            sent = None if engine is None else engine.gradient(parameter)
            if sent is not None:
                parts.append(sent)
            if parameter.grad is not None:
                whole.append(parameter.grad)
        with self._world.collective("clip_grad_norm_()"):
            return clipping.clip(parts, whole, max_norm, norm_type, self._world)

    @hookimpl
    def apply_step(self, optimizer: Optimizer, step: Callable[[], Any]) -> Any:
        """The engines step the parameters that they have, and the optimizer steps in stage 0."""
        if isinstance(step, functools.partial):
            raise RuntimeError(
                f"{type(optimizer).__name__}.step(closure) was called, but DeepSpeed steps by gradients that were averaged before. Call "
                f"accelerator.backward(loss), and then step() without arguments."
            )
        engines = [engine for engine in self._engines() if engine.optimizer is optimizer]
        if not engines:
            result = step()
            for engine in self._engines():
                engine.has_gradients = False
            return result
        for hook in optimizer._optimizer_step_pre_hooks.values():
            hook(optimizer, (), {})
        applied = [engine.step() for engine in engines]
        for hook in optimizer._optimizer_step_post_hooks.values():
            hook(optimizer, (), {})
        optimizer._opt_called = True  # type: ignore[attr-defined]  # by which schedulers know
        return None if all(applied) else SKIPPED

    @hookimpl
    def release_model(self, prepared: nn.Module) -> None:
        """Ends the engine."""
        engine = engine_of(prepared)
        if engine is not None:
            engine.close()
            set_engine(prepared, None)
            self._prepared.pop(prepared, None)

    @hookimpl
    def model_state(self, model: nn.Module) -> State:
        """The masters on this rank."""
        from accel_checkpoint import capture_model

        return capture_model(model, self._sharding)

    @hookimpl
    def model_loaded(self, prepared: nn.Module) -> None:
        """Gives the model the values of the masters, and drops gradients, which belong to the parameters before. A collective."""
        engine = engine_of(prepared)
        if engine is not None:
            engine.drop_gradients()
            engine.publish()

    @hookimpl
    def optimizer_state(self, optimizer: Optimizer, names: Mapping[int, str]) -> OptimizerState:
        """The parts on this rank."""
        from accel_checkpoint import capture_optimizer

        return capture_optimizer(optimizer, names, self._sharding)

    @hookimpl
    def optimizer_misfits(self, optimizer: Optimizer, names: Mapping[int, str], saved: SavedOptimizer) -> list[str]:
        """See `accel_checkpoint.list_misfits`."""
        from accel_checkpoint import list_misfits

        return list_misfits(optimizer, names, self._sharding, saved)

    @hookimpl
    def load_optimizer_state(self, optimizer: Optimizer, names: Mapping[int, str], saved: SavedOptimizer) -> None:
        """Each rank reads its parts into the memory that it steps with."""
        from accel_checkpoint import restore_optimizer

        restore_optimizer(optimizer, names, self._sharding, saved)
        for engine in self._engines():
            if engine.optimizer is optimizer:
                engine.take_state()

    @property
    def _world(self) -> World:
        assert self._world_or_none is not None, "layout() runs in the constructor of the Accelerator"
        return self._world_or_none

    @property
    def _sharding(self) -> ZeroSharding:
        return ZeroSharding(self._engine_of)

    def _engines(self) -> Iterator[ModelEngine]:
        for prepared in self._prepared:
            engine = engine_of(prepared)
            if engine is not None:
                yield engine

    def _engine_of(self, parameter: torch.Tensor) -> ModelEngine | None:
        return next((engine for engine in self._engines() if id(parameter) in engine.fragments), None)

    def _make_engine(self, prepared: PreparedModel, optimizers: Sequence[Optimizer]) -> None:
        from accel_deepspeed import communication

        model, request = prepared.module, self._prepared[prepared]
        optimizer = _only(optimizers, model)
        communication.start(self._world)
        if self._stage:
            optimizer_double.check(optimizer)
        engine = ModelEngine(model, optimizer if self._stage else None, self._config(request), self._world)
        if self._stage and any(optimizer.state.get(each) for each in model.parameters()):
            engine.adopt_state()
        set_engine(prepared, engine)
        weakref.finalize(prepared, engine.close).atexit = False
        self._world.close_before_end(engine)

    def _config(self, request: PrepareRequest) -> dict[str, Any]:
        names = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
        reduce = request.policy.reduce
        return {
            **({} if reduce is None else {"communication_data_type": names[reduce]}),
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            "gradient_clipping": 0.0,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "steps_per_print": None,
            "zero_optimization": {"stage": self._stage},
        }


def _only(optimizers: Sequence[Optimizer], model: nn.Module) -> Optimizer:
    """The one optimizer that holds all trained parameters of a model. Raises `ValueError` if there is none such."""
    optimizer = optimizers[0]
    held = {id(each) for group in optimizer.param_groups for each in group["params"]}
    left = [name for name, each in model.named_parameters() if each.requires_grad and id(each) not in held]
    if left:
        shown = ", ".join(left[:8]) + (f" and {len(left) - 8} more" if len(left) > 8 else "")
        raise ValueError(
            f"{type(optimizer).__name__} holds a part of the trained parameters of {type(model).__name__}, but DeepSpeed steps a model by one "
            f"optimizer, and these are not in it: {shown}. Put them all into one optimizer, in groups of their own if need be; or "
            f"set requires_grad_(False) on those that are not to be trained."
        )
    return optimizer


def _run_backward(loss: torch.Tensor, weight: float, options: dict[str, Any]) -> None:
    if weight == 1.0:
        loss.backward(**options)
    elif loss.dim() or "gradient" in options:
        (loss * weight).backward(**options)
    else:
        loss.backward(torch.tensor(weight, dtype=loss.dtype, device=loss.device), **options)


@contextmanager
def _synchronised(engine: ModelEngine) -> Iterator[None]:
    before, engine.synchronises = engine.synchronises, True
    try:
        yield
    finally:
        engine.synchronises = before
