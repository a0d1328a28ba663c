"""Megatron-core's parallelism under the user's own loop.

Tensor parallelism splits each layer, sequence parallelism the activations between layers, context
parallelism whole sequences; pipelines distribute layers, expert parallelism the experts of a
mixture; the remaining factor is data parallelism. See Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language Models
Using Model Parallelism", arXiv:1909.08053, and Narayanan et al., "Efficient Large-Scale Language
Model Training on GPU Clusters Using Megatron-LM", arXiv:2104.04473.
"""

from __future__ import annotations

import contextlib
import functools
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch

from accel_core import DistributedType, Layout, Strategy, hookimpl
from accel_core.api.component import listed
from accel_core.api.layouts import Elementwise
from accel_megatron import clipping
from accel_megatron.options import Options
from accel_megatron.parallel_groups import Sizes, arrange
from accel_megatron.prepared_model import NoSync, PreparedModel, end_engine, engine_of, is_pipeline
from accel_megatron.stages import Stages

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn
    from torch.optim import Optimizer

    from accel_core import PrepareRequest, World
    from accel_core.api.checkpoint import OptimizerState, SavedOptimizer
    from accel_core.api.layouts import GradientState, State
    from accel_megatron.model_engine import ModelEngine
    from accel_megatron.schedule import Schedule

_NOTHING = contextlib.nullcontext()


class Megatron(Strategy):
    """Megatron-core: divides layers, sequences, the stack of layers and experts among processes.

    `tensor_parallel * pipeline_parallel * context_parallel` processes train one model; how many models there are
    follows from the number of processes. Those of one model read the same data.

    A model is one of Megatron-core's, built by `accelerator.build_model(factory)`. Without model
    parallelism any module is trained, data-parallel.

    Args:
        tensor_parallel: number of processes that compute each layer together.
        pipeline_parallel: number of processes that the layers are divided among. With more
            than one, the script has to train by `accelerator.forward_backward`.
        virtual_pipeline: number of stages in each process. None: one. More stages wait less
            for each other, and send more.
        sequence_parallel: let the processes that compute a layer together divide what travels
            between layers along the sequence, which saves memory.
        context_parallel: number of processes that each sequence is divided among. The attention
            of the model has to support it, as Transformer Engine's does, and the script divides its
            batches: see `megatron.core.utils.get_batch_on_this_cp_rank`.
        expert_parallel: number of processes that the experts of a layer are divided among.
        distributed_optimizer: let data-parallel processes divide the state of the optimizer, Adam
            or AdamW, which saves memory.
        overlap_grad_reduce: send gradients while others are computed.
        overlap_param_gather: send updated parameters while the next forward pass computes.

    Raises:
        ValueError: for options out of range, or that contradict each other.
    """

    distributed_type = DistributedType.MEGATRON_LM.value
    forward_is_collective = True
    replicates_parameters = False
    older_names = ("megatron_lm",)

    def __init__(
        self,
        tensor_parallel: int = 1,
        pipeline_parallel: int = 1,
        virtual_pipeline: int | None = None,
        sequence_parallel: bool = False,
        context_parallel: int = 1,
        expert_parallel: int = 1,
        distributed_optimizer: bool = False,
        overlap_grad_reduce: bool = False,
        overlap_param_gather: bool = False,
    ) -> None:
        for name, size in (
            ("tensor_parallel", tensor_parallel),
            ("pipeline_parallel", pipeline_parallel),
            ("virtual_pipeline", 2 if virtual_pipeline is None else virtual_pipeline),
            ("context_parallel", context_parallel),
            ("expert_parallel", expert_parallel),
        ):
            _check_size(name, size)
        if virtual_pipeline is not None and (pipeline_parallel == 1 or virtual_pipeline < 2):
            raise ValueError(
                f"Megatron(virtual_pipeline={virtual_pipeline}, pipeline_parallel={pipeline_parallel}): interleaved stages are at least two "
                f"on each of at least two processes. Leave virtual_pipeline out, or give more."
            )
        if sequence_parallel and tensor_parallel == 1:
            raise ValueError(
                "Megatron(sequence_parallel=True) cuts activations among the processes that share layers, and tensor_parallel is 1. Give "
                "tensor_parallel=2 or more, or leave sequence_parallel out."
            )
        self._sizes = Sizes(tensor_parallel, pipeline_parallel, virtual_pipeline, context_parallel, expert_parallel)
        self._options = Options(sequence_parallel, distributed_optimizer, overlap_grad_reduce, overlap_param_gather)
        self._world_or_none: World | None = None
        self._arrangement: Any = None
        self._built = 0  # models that were built here
        self._scales_losses = False
        self._prepared: weakref.WeakKeyDictionary[nn.Module, Schedule] = weakref.WeakKeyDictionary()

    def details(self) -> Mapping[str, str]:
        """What is shared out, and what overlaps."""
        options = self._options
        words = [name.replace("_", " ") for name, given in vars(options).items() if given]
        return {"processes": self._sizes.describe(), **({"options": ", ".join(words)} if words else {})}

    def random_state(self) -> Any:
        """The streams of layers that are shared out."""
        from accel_megatron.random_streams import capture

        return capture()

    def load_random_state(self, state: Any, step: int) -> None:
        """Takes them over from the same arrangement, or begins them anew. A collective."""
        from accel_megatron.random_streams import restore

        restore(state, self._world, step)

    @hookimpl
    def layout(self, world: World) -> Layout:
        """Arranges the processes. Raises `ValueError` if sizes do not multiply to the world."""
        self._sizes.check(world.size)
        self._world_or_none = world
        self._arrangement = arrange(world, self._sizes, self)
        return self._arrangement.layout(world)  # type: ignore[no-any-return]

    @hookimpl
    def build_model(self, factory: Callable[..., nn.Module], checkpoint: Path | None) -> nn.Module:
        """The stages of this rank, with the weights of the checkpoint, of which it reads its parts."""
        from accel_megatron.building import build

        number, self._built = self._built, self._built + 1
        return build(factory, checkpoint, self._world, self._sizes, self._options, number)

    @hookimpl
    def prepare_model(self, model: nn.Module, optimizers: Sequence[Optimizer], request: PrepareRequest) -> nn.Module:
        """Places the stages, and gives a model that is trained its buffers of gradients."""
        from accel_megatron.building import prepare
        from accel_megatron.schedule import Schedule

        if isinstance(model, PreparedModel):
            return model
        engine = prepare(model, request, self._world, self._sizes, self._options)
        self._scales_losses = request.policy.compute is torch.float16
        if engine is None:
            return model
        prepared = PreparedModel(model, engine)
        self._prepared[prepared] = Schedule(engine, self._world)
        weakref.finalize(prepared, engine.close).atexit = False
        self._world.close_before_end(engine)
        for optimizer in optimizers:
            self._adopt(prepared, optimizer)
        return prepared

    @hookimpl
    def check_optimizer(self, optimizer: Optimizer) -> None:
        """Gives the engines of its models the optimizer. Raises for one that cannot step them."""
        if "zero_grad" not in vars(optimizer):  # by which the buffers are cleared too; gates come on top of it
            vars(optimizer)["zero_grad"] = functools.partial(_clear, weakref.ref(optimizer), weakref.ref(self))
        for prepared in list(self._prepared):
            self._adopt(prepared, optimizer)

    @hookimpl
    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Backwards of forwards inside keep their gradients on each rank."""
        if isinstance(model, PreparedModel):
            self._refuse_pipeline(model, "no_sync() or accumulate() was entered")
            return NoSync(model)
        return _NOTHING

    @hookimpl
    def trigger_sync_in_backward(self, model: nn.Module) -> AbstractContextManager[None]:
        """The next backward synchronises, although its forward ran inside `no_sync`."""
        engine = engine_of(model)
        return _NOTHING if engine is None else _synchronised(engine)

    @hookimpl
    def backward(self, loss: torch.Tensor, weight: float, options: dict[str, Any]) -> None:
        """Runs the backward, and makes the gradients of models that took part final."""
        for prepared in self._prepared:
            self._refuse_pipeline(prepared, "accelerator.backward(loss) was called")
        engines = self._engines()
        for engine in engines:
            engine.expect_backward()
        if any(_has_auxiliary_losses(engine.config) for engine in engines):
            if self._scales_losses:
                raise RuntimeError(
                    "accelerator.backward(loss) scales the loss for fp16, but not what routers of experts and further heads add to it. Call "
                    "accelerator.forward_backward, which scales both; or train in bf16."
                )
            _scale_auxiliary_losses(torch.full((), weight, device=self._world.device))
        with ExitStack() as stack:
            for engine in engines:
                stack.enter_context(engine.held())
            _run_backward(loss, weight, options)
        for engine in engines:
            engine.end_backward()

    @hookimpl
    def forward_backward(
        self,
        model: nn.Module,
        micro_batches: Iterable[Any],
        loss_fn: Callable[[Any, Any], tuple[torch.Tensor, torch.Tensor | float]],
        inputs: Callable[[Any], tuple[tuple[Any, ...], dict[str, Any]]],
        scale_loss: Callable[[torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        """A window by Megatron's schedule; without gradients enabled, its forwards alone."""
        schedule = self._prepared.get(model)
        if schedule is None or engine_of(model) is None:
            raise ValueError(
                f"forward_backward() was given a {type(model).__name__} that is not trained under Megatron. Pass what prepare() returned for "
                f"a model with parameters that require gradients."
            )
        return schedule.run(micro_batches, loss_fn, inputs, scale_loss)

    @hookimpl
    def check_gradients(self, optimizer: Optimizer) -> None:
        """Raises for gradients that no backward has sent."""
        for engine in self._engines():
            if engine.holds_back and engine.steps_with(optimizer):
                raise RuntimeError(
                    f"{type(optimizer).__name__}.step() was called while its model holds back gradients, which no backward has sent to the "
                    f"other ranks. Whether gradients travel is decided where the model is called: call it outside no_sync() for the last "
                    f"backward before the step; or put that backward into accelerator.trigger_sync_in_backward(model)."
                )

    @hookimpl
    def gradient_state(self, model: nn.Module, prepared: nn.Module) -> GradientState:
        """What this rank has of final gradients, or what it has not sent."""
        engine = engine_of(prepared)
        if engine is not None:
            return engine.gradient_state()
        named = model.named_parameters()
        return {name: [Elementwise.whole(each.grad)] for name, each in named if each.grad is not None}

    @hookimpl
    def clip_gradients(self, parameters: Sequence[nn.Parameter], max_norm: float, norm_type: float) -> torch.Tensor:
        """By the norm over all parts, of which copies count once. A collective."""
        engines = self._engines()
        with self._world.collective("clip_grad_norm_()"):
            norm = clipping.joint_norm(engines, parameters, norm_type, self._world.device)
        if not math.isinf(max_norm):
            factor = clipping.factor(norm, max_norm)
            wanted = {id(each): each for each in parameters}
            for engine in engines:
                engine.scale_some(wanted, factor)
                for key in engine.parts:
                    wanted.pop(key, None)
            for each in wanted.values():
                if each.grad is not None:
                    each.grad.mul_(factor)
        return norm

    @hookimpl
    def apply_step(self, optimizer: Optimizer, step: Callable[[], Any]) -> Any:
        """Steps by final gradients: the optimizer, or Megatron's distributed one in its place."""
        if isinstance(step, functools.partial):
            raise RuntimeError(
                f"{type(optimizer).__name__}.step(closure) was called, but Megatron steps by gradients that were reduced before. Call "
                f"accelerator.backward(loss), and then step() without arguments."
            )
        engines = [engine for engine in self._engines() if engine.steps_with(optimizer)]
        if not self._options.distributed_optimizer or not engines:
            with ExitStack() as stack:
                for engine in engines:
                    stack.enter_context(engine.shown_gradients(optimizer))
                return step()
        for hook in optimizer._optimizer_step_pre_hooks.values():
            hook(optimizer, (), {})
        for engine in engines:
            engine.step_distributed(optimizer)
        for hook in optimizer._optimizer_step_post_hooks.values():
            hook(optimizer, (), {})
        optimizer._opt_called = True  # type: ignore[attr-defined]  # by which schedulers know
        return None

    @hookimpl
    def release_model(self, prepared: nn.Module) -> None:
        """Ends the engine."""
        engine = engine_of(prepared)
        if engine is not None:
            engine.close()
            end_engine(prepared)

    @hookimpl
    def model_state(self, model: nn.Module) -> State:
        """The parts on this rank, and the names of all others."""
        from accel_megatron.state import model_state

        return model_state(model)

    @hookimpl
    def model_loaded(self, prepared: nn.Module) -> None:
        """Gives the model the masters' values, and drops old gradients. A collective."""
        engine = engine_of(prepared)
        if engine is not None:
            engine.clear()
            engine.publish()

    @hookimpl
    def optimizer_state(self, optimizer: Optimizer, names: Mapping[int, str]) -> OptimizerState:
        """The parts on this rank."""
        from accel_checkpoint import capture_optimizer
        from accel_megatron.sharding import MegatronSharding

        for engine in self._stepping(optimizer):
            engine.link_state(optimizer)
        return capture_optimizer(optimizer, names, MegatronSharding())

    @hookimpl
    def optimizer_misfits(self, optimizer: Optimizer, names: Mapping[int, str], saved: SavedOptimizer) -> list[str]:
        """See `accel_checkpoint.list_misfits`."""
        from accel_checkpoint import list_misfits
        from accel_megatron.sharding import MegatronSharding

        return list_misfits(optimizer, names, MegatronSharding(), saved, self._names_elsewhere(names))

    @hookimpl
    def load_optimizer_state(self, optimizer: Optimizer, names: Mapping[int, str], saved: SavedOptimizer) -> None:
        """Each rank reads its parts."""
        from accel_checkpoint import restore_optimizer
        from accel_megatron.sharding import MegatronSharding

        restore_optimizer(optimizer, names, MegatronSharding(), saved)
        for engine in self._stepping(optimizer):
            engine.take_state(optimizer)

    @property
    def _world(self) -> World:
        assert self._world_or_none is not None, "layout() runs in the constructor of the Accelerator"
        return self._world_or_none

    def _engines(self) -> list[ModelEngine]:
        return [engine for prepared in self._prepared if (engine := engine_of(prepared)) is not None]

    def _stepping(self, optimizer: Optimizer) -> Iterator[ModelEngine]:
        return (engine for engine in self._engines() if engine.steps_with(optimizer))

    def _names_elsewhere(self, names: Mapping[int, str]) -> set[str]:
        """The names of all parameters of models of which this rank has stages."""
        found = set()
        for prepared in self._prepared:
            model = vars(prepared)["_modules"]["module"]
            first = next(model.parameters(), None)
            if isinstance(model, Stages) and first is not None:
                number = names[id(first)].partition(".")[0]
                found |= {f"{number}.{name}" for name in model.order}
        return found

    def _adopt(self, prepared: nn.Module, optimizer: Optimizer) -> None:
        engine = engine_of(prepared)
        held = {id(each) for group in optimizer.param_groups for each in group["params"]}
        if engine is None or engine.optimizer is not None or not held & engine.parts.keys():
            return
        left = [part.name for key, part in engine.parts.items() if key not in held]
        if left:
            raise ValueError(
                f"{type(optimizer).__name__} holds a part of the trained parameters of {type(vars(prepared)['_modules']['module']).__name__}, "
                f"but Megatron keeps the gradients of a model together, for one optimizer, and these are not in it: {listed(left)}. Put them all "
                f"into one optimizer, in groups of their own if need be; or set requires_grad_(False) on those that are not to be trained."
            )
        engine.adopt(optimizer)

    def _refuse_pipeline(self, model: nn.Module, what: str) -> None:
        engine = engine_of(model)
        if engine is not None and is_pipeline(engine):
            raise RuntimeError(
                f"{what}, but pipeline_parallel={self._sizes.pipeline}: a rank has stages of the model, whose forwards and backwards Megatron "
                f"schedules together. Call accelerator.forward_backward(model, micro_batches, loss_fn) for a whole window."
            )


def _clear(optimizer: weakref.ref[Optimizer], strategy: weakref.ref[Megatron], set_to_none: bool = True) -> None:
    """The `zero_grad` of an optimizer whose gradients are in Megatron's buffers."""
    own, engines = optimizer(), strategy()
    assert own is not None, "it is called through the optimizer"
    type(own).zero_grad(own, set_to_none)
    for engine in engines._stepping(own) if engines is not None else ():
        engine.clear()


def _check_size(name: str, size: object) -> None:
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise ValueError(
            f"Megatron({name}={size!r}): expected how many, a whole number of at least 1. Leave it out for 1."
        )


def _has_auxiliary_losses(config: Any) -> bool:
    given = getattr(config, "moe_aux_loss_coeff", 0.0)  # a list where there are several kinds of losses
    of_routers = [*(given if isinstance(given, list) else [given]), getattr(config, "moe_z_loss_coeff", None)]
    has_routers = getattr(config, "num_moe_experts", None) and any(of_routers)
    return bool(has_routers or getattr(config, "mtp_num_layers", None))


def _scale_auxiliary_losses(scale: torch.Tensor) -> None:
    """Weighs what routers of experts, and further heads, add to the loss in a backward of Megatron's own."""
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
    from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler

    MoEAuxLossAutoScaler.set_loss_scale(scale)
    MTPLossAutoScaler.set_loss_scale(scale)


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
