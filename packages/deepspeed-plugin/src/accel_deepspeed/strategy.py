"""ZeRO over DeepSpeed's engines, under the user's own loop.

Stage 1 shares out the state of optimizers among the processes, stage 2 gradients as well, stage 3
parameters as well; stage 0 averages gradients, as DDP does. See Rajbhandari et al., "ZeRO: Memory
Optimizations Toward Training Trillion Parameter Models", arXiv:1910.02054.

The loop stays the user's: it ends windows, clips, steps and schedules. Each model has an
engine of its own, so there may be any number of them.
"""

from __future__ import annotations

import contextlib
import functools
import math
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import torch

from accel_checkpoint import on_each_rank
from accel_core import (
    SKIPPED,
    DistributedType,
    Layout,
    Strategy,
    hookimpl,
    load_checkpoint_in_model,
    place_model,
)
from accel_core.api.component import listed, override_class
from accel_core.api.layouts import Elementwise
from accel_core.api.strategy import check_alike, compile_calls, override_calls
from accel_deepspeed import clipping, optimizer_double
from accel_deepspeed.configuration import Configuration, hidden_size_of
from accel_deepspeed.configuration_completion import accumulation_steps
from accel_deepspeed.configuration_offload import check_files
from accel_deepspeed.configured_objects import check_schedule, compiled_for, realise
from accel_deepspeed.engine_internals import is_shared_out, set_leaf_modules
from accel_deepspeed.export import SavesWhole, StatesParts
from accel_deepspeed.model_engine import ModelEngine, live_engines
from accel_deepspeed.older_names import OlderAttributes
from accel_deepspeed.operators import prepare_operators
from accel_deepspeed.prepared_model import NoSync, PreparedModel, engine_of, set_engine
from accel_deepspeed.sharding import ZeroSharding
from accel_deepspeed.state_files import StateFiles
from accel_deepspeed.zero_init import build, cast, is_built

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn
    from torch.distributed import ProcessGroup
    from torch.optim import Optimizer

    from accel_core import PrepareRequest, World
    from accel_core.api.checkpoint import OptimizerState, SavedOptimizer
    from accel_core.api.layouts import GradientState, State
    from accel_deepspeed.flat_state import FlatState

_NOTHING = contextlib.nullcontext()


class DeepSpeed(OlderAttributes, Strategy):
    """ZeRO: divides optimizer state, gradients and, in stage 3, the model among the processes.

    Each model is trained by one optimizer of the user's, which DeepSpeed steps in flat parts. A
    model that is wholly frozen, or prepared for evaluation only, is not shared out: one rank alone
    may call it.

    Args:
        zero_stage: parts to share out: 0 nothing, 1 optimizer state, 2 also gradients, 3 also
            parameters. None: the stage in the configuration, else 2.
        config: configuration of DeepSpeed: the path of a JSON file, or a dictionary. Values
            "auto" are filled in when a model is prepared.
        offload_optimizer: place of optimizer state and master weights: "cpu", "nvme" (stage 3), or
            "none". None: the place in the configuration.
        offload_param: place of parameters that are not in use, in stage 3: "cpu", "nvme" (if all
            are trained), or "none". None: the place in the configuration.
        offload_folder: folder for what is placed on "nvme".
        gradient_clipping: norm to which the gradients of a model are clipped before each step,
            unless the loop clips by itself. 0: no clipping. None: the norm in the
            configuration, else no clipping.
        moe_leaf_modules: names of classes whose modules are gathered as a whole in stage 3, because
            processes use different parts of them: mixtures of experts.

    Raises:
        TypeError, ValueError: for unknown keys, with the nearest known one, and for values that
            contradict each other.
    """

    distributed_type = DistributedType.DEEPSPEED.value
    forward_is_collective = True
    replicates_parameters = False

    def __init__(
        self,
        zero_stage: int | None = None,
        config: str | Path | Mapping[str, Any] | None = None,
        offload_optimizer: str | None = None,
        offload_param: str | None = None,
        offload_folder: str | Path | None = None,
        gradient_clipping: float | None = None,
        moe_leaf_modules: Sequence[str] = (),
    ) -> None:
        self.configuration = Configuration.read(
            config,
            zero_stage=zero_stage,
            offload_optimizer=offload_optimizer,
            offload_param=offload_param,
            offload_folder=offload_folder,
            gradient_clipping=gradient_clipping,
        )
        self._compares_steps = True
        self._leaves = tuple(moe_leaf_modules)
        self._world_or_none: World | None = None
        self._prepared: weakref.WeakKeyDictionary[nn.Module, PrepareRequest] = weakref.WeakKeyDictionary()

    def details(self) -> Mapping[str, str]:
        """The stage, what is kept where, and what is clipped."""
        found = self.configuration
        described = {
            "stage": str(found.stage),
            "optimizer state": "" if found.offload_optimizer == "none" else f"on {found.offload_optimizer}",
            "parameters": "" if found.offload_param == "none" else f"on {found.offload_param}",
            "clipping": f"to the norm {found.clipping}, unless the loop clips" if found.clipping else "",
        }
        return {name: words for name, words in described.items() if words}

    @hookimpl
    def layout(self, world: World) -> Layout:
        """Pure data parallelism."""
        self._world_or_none = world
        vars(self).pop("_group", None)
        return Layout.data_parallel(world)

    @hookimpl
    def build_model(self, factory: Callable[[], nn.Module], checkpoint: Path | None) -> nn.Module:
        """In stage 3 a model that no rank has whole; else the factory's, with the weights."""
        if self.configuration.stage == 3:
            self._check_files("a model that is built in parts")
            prepare_operators(compiled_for(None, self.configuration), self._world, _say)
            return build(factory, checkpoint, self._config_without_dtypes(), self._world)
        model = factory()
        if checkpoint is not None:
            load_checkpoint_in_model(model, checkpoint)
        return model

    @hookimpl
    def prepare_model(self, model: nn.Module, optimizers: Sequence[Optimizer], request: PrepareRequest) -> nn.Module:
        """Places and wraps the model, unless frozen or only evaluated. Its engine comes later."""
        if isinstance(model, PreparedModel):
            return model
        built = is_built(model)
        trains = not request.evaluation and any(parameter.requires_grad for parameter in model.parameters())
        if not trains:
            if built:
                raise ValueError(
                    f"{type(model).__name__} was built by build_model() under ZeRO stage 3, so each rank has a part of it, and it is to be "
                    f"prepared without training. Build a model that is only evaluated without build_model()."
                )
            place_model(model, request)
            return model
        check_alike(model, self._world)
        stage = self.configuration.stage
        if stage:
            saves = stage == 3 and callable(getattr(type(model), "save_pretrained", None))
            override_class(model, SavesWhole if saves else StatesParts)
        if built:
            _prepare_built(model, request)
        else:
            place_model(model, request)
        _check_dims(model)
        prepared = PreparedModel(model, stage == 3)
        self._prepared[prepared] = request
        if optimizers:
            self._make_engine(prepared, optimizers)
        return prepared

    @hookimpl
    def check_optimizer(self, optimizer: Optimizer) -> None:
        """Makes the engines of its models. Raises for an optimizer that ZeRO cannot step."""
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
        """Runs the backward, and the engines of all models through which the loss came.

        `scale_wrt_gas=False` among the options says that the caller has divided the loss by its own steps.
        """
        if not options.pop("scale_wrt_gas", True):
            self._compares_steps = False
        if self._compares_steps:
            self._check_accumulation(weight)
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
            left = [
                name for name, each in engine.model.named_parameters() if each.grad is not None and id(each) in held
            ]
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
        own, engines = {id(each): each for each in parameters}, live_engines()
        if self.configuration.clipping and not math.isinf(max_norm):
            for engine in engines:
                engine.clipped |= any(id(each) in own for each in engine.model.parameters())
        parts = [part for engine in engines for part in engine.sent_gradients(own)]
        whole = [each.grad for each in own.values() if each.grad is not None]
        clipped = [engine for engine in engines if engine.has_gradients and engine.fragments.keys() <= own.keys()]
        note = hash(tuple(engine.used for engine in clipped))
        with self._world.collective("clip_grad_norm_()"):
            norm, gathered = clipping.joint_norm(parts, whole, norm_type, self._world.device, self._group, note)
        for engine in clipped:
            engine.gathered = gathered
        if not math.isinf(max_norm):
            factor = clipping.factor(norm, max_norm)
            later = [engine for engine in clipped if engine.scale_in_step(factor)]
            now = [part for engine in engines if engine not in later for part in engine.sent_gradients(own)]
            clipping.scale([*now, *whole], factor)
        return norm

    @hookimpl
    def apply_step(self, optimizer: Optimizer, step: Callable[[], Any]) -> Any:
        """The engines step the parameters that they have, and the optimizer steps in stage 0."""
        if isinstance(step, functools.partial):
            raise RuntimeError(
                f"{type(optimizer).__name__}.step(closure) was called, but DeepSpeed steps by gradients that were averaged before. Call "
                f"accelerator.backward(loss), and then step() without arguments."
            )
        check_schedule(optimizer, self.configuration)
        engines = [engine for engine in self._engines() if engine.optimizer is optimizer]
        if self.configuration.clipping:
            self._clip_unasked(engines, self.configuration.clipping)
        if not self.configuration.stage:
            return step()
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

        return capture_model(model, ZeroSharding())

    @hookimpl
    def model_loaded(self, prepared: nn.Module) -> None:
        """Gives the model the masters' values, and drops old gradients. A collective."""
        engine = engine_of(prepared)
        if engine is not None:
            engine.drop_gradients()
            engine.publish()

    @hookimpl
    def optimizer_state(self, optimizer: Optimizer, names: Mapping[int, str]) -> OptimizerState:
        """The parts on this rank."""
        from accel_checkpoint import capture_optimizer

        for state in self._states(optimizer):
            state.link()  # for numbers, which are no views
        return capture_optimizer(optimizer, names, ZeroSharding())

    @hookimpl
    def optimizer_misfits(self, optimizer: Optimizer, names: Mapping[int, str], saved: SavedOptimizer) -> list[str]:
        """See `accel_checkpoint.list_misfits`; also values that differ within a group."""
        from accel_checkpoint import list_misfits

        unlike = (state.list_unlike(names, saved) for state in self._states(optimizer))
        return list_misfits(optimizer, names, ZeroSharding(), saved) or [line for each in unlike for line in each]

    @hookimpl
    def load_optimizer_state(self, optimizer: Optimizer, names: Mapping[int, str], saved: SavedOptimizer) -> None:
        """Each rank reads its parts into the memory that it steps with."""
        from accel_checkpoint import restore_optimizer

        restore_optimizer(optimizer, names, ZeroSharding(), saved)
        for state in self._states(optimizer):
            state.take()

    @property
    def _world(self) -> World:
        assert self._world_or_none is not None, "layout() runs in the constructor of the Accelerator"
        return self._world_or_none

    @functools.cached_property
    def _group(self) -> ProcessGroup | None:
        return clipping.group_of(self._world)

    def _engines(self) -> Iterator[ModelEngine]:
        for prepared in self._prepared:
            engine = engine_of(prepared)
            if engine is not None:
                yield engine

    def _states(self, optimizer: Optimizer) -> list[FlatState]:
        """What the engines keep that step in the place of an optimizer."""
        return [engine.state for engine in self._engines() if engine.optimizer is optimizer and engine.state]

    def _make_engine(self, prepared: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        from accel_deepspeed import communication

        assert isinstance(prepared, PreparedModel), "they are made here"
        model, request, configuration = prepared.module, self._prepared[prepared], self.current_configuration()
        optimizer = only_optimizer(optimizers, model)
        communication.start(self._world)
        config = on_each_rank(self._world, "for a configuration to be completed", lambda: self._config(model, request))
        prepare_operators(compiled_for(optimizer, configuration), self._world, _say)
        realise(optimizer, configuration, self._world.device.type)
        if configuration.stage:
            optimizer_double.check(optimizer, offloads=configuration.offload_optimizer != "none")
            optimizer_double.declare_layouts(optimizer)
        if self._leaves and configuration.stage == 3:
            set_leaf_modules(model, self._leaves)
        folder = configuration.state_folder
        files = None if folder is None else StateFiles(folder)
        engine = ModelEngine(model, optimizer, configuration.stage > 0, config, self._world, files)
        set_engine(prepared, engine)
        weakref.finalize(prepared, engine.close).atexit = False
        self._world.close_before_end(engine)

    def _config(self, model: nn.Module, request: PrepareRequest) -> dict[str, Any]:
        configuration = self.configuration
        frozen = any(not parameter.requires_grad for parameter in model.parameters())
        self._check_files("frozen parameters" if frozen else "")
        dtypes = {parameter.dtype for parameter in model.parameters() if parameter.requires_grad}
        return configuration.resolved(
            world_size=self._world.size,
            policy=request.policy,
            hidden_size=hidden_size_of(model),
            parameter_dtype=dtypes.pop() if len(dtypes) == 1 else None,
        )

    def _check_files(self, stays: str) -> None:
        check_files(self.configuration.offload_param, stays)

    def _config_without_dtypes(self) -> dict[str, Any]:
        """A configuration for building a model in single precision; it is cast when prepared."""
        zero = {
            name: value for name, value in self.configuration.values["zero_optimization"].items() if value != "auto"
        }
        return {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero}

    def _check_accumulation(self, weight: float) -> None:
        """Raises at the first backward if the configuration has other accumulation steps."""
        self._compares_steps = False
        asked = accumulation_steps(self.configuration.values, self._world.size)
        if asked is not None and not math.isclose(weight * asked, 1.0, rel_tol=1e-6):
            raise ValueError(
                f"{self.configuration.source} accumulates over {asked} steps, by 'gradient_accumulation_steps' or by its batch sizes, but "
                f"a micro-batch has the weight {weight:g} here, as with Accelerator(gradient_accumulation_steps={round(1 / weight)}). Give "
                f'both the same number, or write "auto" in the configuration.'
            )

    def _clip_unasked(self, engines: Sequence[ModelEngine], norm: float) -> None:
        """Clips the gradients of each model to a norm, unless the loop has."""
        for engine in engines:
            if not engine.clipped:
                self.clip_gradients(list(engine.model.parameters()), norm, 2.0)
            engine.clipped = False


def only_optimizer(optimizers: Sequence[Optimizer], model: nn.Module) -> Optimizer:
    """The one optimizer of all trained parameters of a model. ValueError if there is none."""
    optimizer = optimizers[0]
    held = {id(each) for group in optimizer.param_groups for each in group["params"]}
    left = [name for name, each in model.named_parameters() if each.requires_grad and id(each) not in held]
    if left:
        raise ValueError(
            f"{type(optimizer).__name__} holds a part of the trained parameters of {type(model).__name__}, but DeepSpeed steps a model by one "
            f"optimizer, and these are not in it: {listed(left)}. Put them all into one optimizer, in groups of their own if need be; or "
            f"set requires_grad_(False) on those that are not to be trained."
        )
    return optimizer


def _check_dims(model: nn.Module) -> None:
    numbers = [
        name for name, parameter in model.named_parameters() if not parameter.dim() and not is_shared_out(parameter)
    ]
    if numbers:
        raise ValueError(
            f"{type(model).__name__} was prepared under DeepSpeed, which cannot send parameters without dims: {', '.join(numbers)}. Give each "
            f"of them one: nn.Parameter(torch.ones(1)); or use strategy='ddp' or 'fsdp'."
        )


def _prepare_built(model: nn.Module, request: PrepareRequest) -> None:
    """Does what `place_model` does, for a model that is sharded already."""
    if request.policy.param is not None:
        cast(model, request.policy.param)
    override_calls(model, request.policy, request.device_type, request.autocast)
    if request.compile_options is not None:
        compile_calls(model, request.compile_options)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)  # noqa: T201  (nobody has to configure logging to be told why a run stands still)


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
