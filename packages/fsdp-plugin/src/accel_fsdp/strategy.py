"""Fully sharded data parallelism over torch's `fully_shard`.

Every process holds a part of each parameter, of its gradient and of what the optimizer keeps for
it. A unit of the model is gathered when it computes, and let go of afterwards; gradients are
averaged and cut as soon as a unit's backward is done. So memory for parameters, gradients and
optimizer state shrinks with the number of processes, for about half as much communication again as
under DDP. See Zhao et al., "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel",
arXiv:2304.11277.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch

from accel_core import DistributedType, Strategy, hookimpl
from accel_core.api.layouts import Elementwise
from accel_fsdp.clipping import clip
from accel_fsdp.engine_internals import drop_held, parts_behind
from accel_fsdp.gathering import dtypes_asked_for
from accel_fsdp.gradient_sync import NoSync, synchronisation_of, triggered
from accel_fsdp.meta_init import Recipes
from accel_fsdp.optimizers import check
from accel_fsdp.preparing import (
    Options,
    Place,
    Sharded,
    adopt,
    dress_and_compile,
    prepare,
    prepare_whole,
)
from accel_fsdp.sharding import DTensorSharding, is_sharded
from accel_fsdp.tensor_parallel import check_plan
from accel_fsdp.torch_versions import held_gradient
from accel_fsdp.validation import check_again, check_apart, check_late, check_policy
from accel_fsdp.wrapping import Ignored, Wrap  # noqa: TC001  # the types of options are read at run time

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn
    from torch.optim import Optimizer

    from accel_core import Layout, PrepareRequest, World
    from accel_core.api.checkpoint import OptimizerState, SavedOptimizer
    from accel_core.api.layouts import GradientState, State
    from accel_fsdp.tensor_parallel import Plan

_NOTHING = contextlib.nullcontext()


class FSDP(Strategy):
    """Fully sharded data parallelism: divides a model that is too large for one device.

    `replicate * shard * context_parallel * tensor_parallel` is the number of processes; the number
    of shards follows, if it is not given.

    What a model computes is what it computes under any other strategy, in every dtype: parameters
    keep their dtype, and a `compute` dtype is that of autocast. Where there is one, parameters are
    gathered in it, but for those of norms and embeddings, which autocast leaves alone.
    `gather_dtype` gathers all of them in one dtype: in bfloat16, norms and embeddings then compute
    with rounded parameters (on a CPU, a norm of a float32 input refuses to); in float32, autocast
    keeps a copy of every weight until the backward.

    A model that is frozen as a whole, or prepared for evaluation only, is not sharded: one rank
    alone may call it.

    Args:
        reshard_after_forward: release the parameters of a unit (layers that are gathered together)
            between its forward and its backward pass. False keeps them, which costs memory and
            saves a gather. A number keeps them in parts, on that many neighbouring processes.
            Without gradients they are always released.
        replicate: number of groups of processes that each hold the whole model. 2 on two machines
            keeps the gathering inside each machine.
        tensor_parallel: number of processes that compute each layer together, of those layers that
            the script names (`parallelize_plan`).
        context_parallel: number of processes that divide each sequence among themselves, where the
            script says so (`accelerator.maybe_context_parallel`).
        wrap: layers that are gathered together, as one unit. None: each of the repeated blocks.
            Else names of classes, the least number of parameters of a unit, or "none" for the whole
            model as one unit; in Python also a function of a module and its name.
        parallelize_plan: plan that divides layers among tensor-parallel processes: names, with "*",
            and styles of `torch.distributed.tensor.parallel` or the words "colwise", "rowwise", …;
            or a function of the model and the mesh.
        cpu_offload: keep parameters, gradients and optimizer state in the main memory of the machine.
        activation_checkpointing: compute the results of units again in the backward pass, instead
            of keeping them. Saves memory, costs time.
        ignored_modules: names of modules that every process keeps whole, in which "*" stands for
            anything; in Python also the modules. Their gradients are averaged.
        gather_dtype: number format in which all parameters are gathered. None: the one that the
            precision computes in, if it names one, except for norms and embeddings.
        reduce_unused_parameters: send zeros for parameters that a process did not use, so that
            processes may use different ones (experts, modalities). Their gradient is then zero,
            not missing, even if no process used them. False is right only if all processes
            always use the same: otherwise gradients of different parameters are added up, and no
            message says so.
        shard: number of processes that share a copy of the parameters. None: as many as the other
            dimensions leave.

    Raises:
        TypeError, ValueError: for a value of another type, or out of range.
    """

    distributed_type = DistributedType.FSDP.value
    places_models = True
    forward_is_collective = True
    replicates_parameters = False

    def __init__(
        self,
        reshard_after_forward: bool | int = True,
        replicate: int = 1,
        tensor_parallel: int = 1,
        context_parallel: int = 1,
        wrap: Wrap = None,
        parallelize_plan: Plan | None = None,
        cpu_offload: bool = False,
        activation_checkpointing: bool = False,
        ignored_modules: Ignored = None,
        gather_dtype: torch.dtype | None = None,
        reduce_unused_parameters: bool = True,
        shard: int | None = None,
    ) -> None:
        for name, count in (
            ("replicate", replicate),
            ("tensor_parallel", tensor_parallel),
            ("context_parallel", context_parallel),
            ("shard", 1 if shard is None else shard),
        ):
            _check_count(name, count)
        check_plan(parallelize_plan, tensor_parallel)
        if tensor_parallel > 1 and not isinstance(reshard_after_forward, bool):
            raise ValueError(
                f"FSDP(reshard_after_forward={reshard_after_forward!r}, tensor_parallel={tensor_parallel}) was asked for, but parameters "
                f"that tensor parallelism has cut cannot be kept in parts on fewer ranks. Give reshard_after_forward=True or False."
            )
        self._sizes: dict[str, Any] = {
            "replicate": replicate,
            "context": context_parallel,
            "tensor": tensor_parallel,
            "shard": shard,
        }
        self._options = Options(
            reshard_after_forward=reshard_after_forward,
            wrap=wrap,
            parallelize_plan=parallelize_plan,
            cpu_offload=cpu_offload,
            activation_checkpointing=activation_checkpointing,
            ignored_modules=ignored_modules,
            gather_dtype=gather_dtype,
            reduce_unused_parameters=reduce_unused_parameters,
        )
        self._place: Place | None = None
        self._models: weakref.WeakKeyDictionary[nn.Module, Sharded] = weakref.WeakKeyDictionary()
        self._whole: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._frozen: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._stepping: weakref.WeakSet[Optimizer] = weakref.WeakSet()

    def details(self) -> Mapping[str, str]:
        """The mesh, the units of every model, dtypes, and what is kept where."""
        described = {"mesh": self._here.meshes.describe()} if self._place is not None else {}
        for number, sharded in enumerate(self._models.values()):
            described["units" if not number else f"units of model {number + 1}"] = sharded.units
            if sharded.gathered:
                described["gathered"] = sharded.gathered
        return {**described, **self._options.describe()}

    @hookimpl
    def layout(self, world: World) -> Layout:
        """Arranges the processes. Raises `ValueError` if numbers do not multiply to the world."""
        from accel_fsdp.mesh import Meshes, Sizes

        sizes = Sizes.of(world.size, **self._sizes)
        self._options.check_shards(sizes.shard * sizes.context)  # before groups are made
        meshes = Meshes.build(world, **self._sizes)
        self._place = Place(world, meshes, Recipes())
        return meshes.layout()

    @hookimpl
    def build_model(self, factory: Callable[[], nn.Module], checkpoint: Path | None) -> nn.Module:
        """A model on the meta device; `prepare` gives each process its part."""
        return self._here.recipes.build(factory, checkpoint)

    @hookimpl
    def prepare_model(self, model: nn.Module, optimizers: Sequence[Optimizer], request: PrepareRequest) -> nn.Module:
        """Shards the model in place; one that is not trained is placed whole."""
        own = synchronisation_of(model)
        cut_as = self._sizes, self._options, dtypes_asked_for(request, self._options.gather_dtype)
        if own is not None:
            check_again(model, own.cut_as, cut_as, request.policy)
            dress_and_compile(model, request)
            return model
        check_policy(request.policy)
        check_apart(model, self._models, self._whole)
        trains = any(parameter.requires_grad for parameter in model.parameters())
        self._frozen.discard(model)
        if request.evaluation or not trains:
            prepare_whole(model, request, self._here)
            self._whole.add(model)
            if not request.evaluation and self._here.world.size > 1:
                self._frozen.add(model)
        else:
            self._whole.discard(model)
            self._models[model] = prepare(model, optimizers, request, self._options, self._here)
            own = synchronisation_of(model)
            assert own is not None, "it is sharded now"
            own.cut_as = cut_as
        return model

    @hookimpl
    def check_optimizer(self, optimizer: Optimizer) -> None:
        """Raises for an optimizer that cannot step shards; gives an earlier one its shards."""
        for model, sharded in self._models.items():
            adopt(model, sharded.former, optimizer)
        check_late(optimizer, self._models, self._frozen)
        check(optimizer)
        if optimizer not in self._stepping:
            self._stepping.add(optimizer)
            optimizer.register_step_post_hook(_Outdating(self._models))

    @hookimpl
    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Backwards of forwards inside keep their gradients, whole, on each rank."""
        own = synchronisation_of(model)
        return _NOTHING if own is None else NoSync(own)

    @hookimpl
    def trigger_sync_in_backward(self, model: nn.Module) -> AbstractContextManager[None]:
        """The next backward synchronises, although its forward ran inside `no_sync`."""
        own = synchronisation_of(model)
        return _NOTHING if own is None else triggered(own)

    @hookimpl
    def check_gradients(self, optimizer: Optimizer) -> None:
        """Raises for gradients that this rank still holds back: the step would lack them."""
        for model in self._models:
            own = synchronisation_of(model)
            assert own is not None, "it was sharded here"
            held = own.held(model)
            if not (held or own.whole.changed):
                continue
            stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
            named = dict(model.named_parameters(remove_duplicate=False))
            left = [name for name, gradient in held.items() if id(named[name]) in stepped and bool(gradient.any())]
            local = own.whole.local()
            left += [name for name, each in named.items() if id(each) in stepped and id(each) in local]
            if left:
                raise RuntimeError(
                    f"{type(optimizer).__name__}.step() was called while {type(model).__name__} holds back gradients of {len(left)} of its "
                    f"parameters, {left[0]!r} for one, which no backward has sent to the other ranks. Whether gradients travel is decided "
                    f"where the model is called: call it as a whole, and not a part of it, outside no_sync() for the last backward "
                    f"before the step; or put that backward into accelerator.trigger_sync_in_backward(model)."
                )

    @hookimpl
    def gradient_state(self, model: nn.Module) -> GradientState:
        """The parts on this rank, and whole local gradients that have not travelled."""
        own = synchronisation_of(model)
        if own is not None:
            return own.gradients(model)
        named = model.named_parameters()  # a model that was frozen when it was prepared
        return {name: [Elementwise.whole(each.grad)] for name, each in named if each.grad is not None}

    @hookimpl
    def clip_gradients(self, parameters: Sequence[nn.Parameter], max_norm: float, norm_type: float) -> torch.Tensor:
        """By the norm over all parts, of any mesh. A collective."""
        stepped = self._stepped(parameters)
        with self._here.world.collective("clip_grad_norm_()"):
            return clip(stepped, max_norm, norm_type, self._held(stepped) if math.isinf(max_norm) else ())

    @hookimpl
    def context_parallel(
        self,
        buffers: Sequence[torch.Tensor],
        buffer_seq_dims: Sequence[int],
        no_restore_buffers: Collection[torch.Tensor],
    ) -> AbstractContextManager[None]:
        """Inside, tensors hold this rank's part of the sequence, and attention spans all parts."""
        mesh = self._here.meshes.context
        if mesh is None:
            return _NOTHING
        from accel_fsdp.context_parallel import split_sequence

        return split_sequence(mesh.get_group(), buffers, buffer_seq_dims, set(no_restore_buffers))

    @hookimpl
    def model_state(self, model: nn.Module) -> State:
        """The parts on this rank."""
        from accel_checkpoint import capture_model

        own = synchronisation_of(model)
        if own is not None:
            own.reshard()
        return capture_model(model, DTensorSharding())

    @hookimpl
    def model_loaded(self, model: nn.Module) -> None:
        """Drops unsynchronised gradients, which belong to the parameters before loading."""
        own = synchronisation_of(model)
        if own is not None:
            drop_held(own.cuts)

    @hookimpl
    def optimizer_state(self, optimizer: Optimizer, names: Mapping[int, str]) -> OptimizerState:
        """The parts on this rank."""
        from accel_checkpoint import capture_optimizer

        return capture_optimizer(optimizer, names, DTensorSharding())

    @hookimpl
    def optimizer_misfits(self, optimizer: Optimizer, names: Mapping[int, str], saved: SavedOptimizer) -> list[str]:
        """See `accel_checkpoint.optimizers.optimizer_state.list_misfits`."""
        from accel_checkpoint import list_misfits

        return list_misfits(optimizer, names, DTensorSharding(), saved)

    @hookimpl
    def load_optimizer_state(self, optimizer: Optimizer, names: Mapping[int, str], saved: SavedOptimizer) -> None:
        """Each rank reads its parts."""
        from accel_checkpoint import restore_optimizer

        restore_optimizer(optimizer, names, DTensorSharding(), saved)

    def _stepped(self, parameters: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Shows the shards, which have the gradients, in the places of gathered parameters."""
        if all(map(is_sharded, parameters)):
            return parameters
        parts: dict[int, torch.Tensor] = {}
        for model in self._models:
            own = synchronisation_of(model)
            assert own is not None, "it was sharded here"
            parts.update(parts_behind(own.cuts))
        return [parts.get(id(parameter), parameter) for parameter in parameters]

    def _held(self, stepped: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The whole local gradients, of the given parts, that wait for synchronisation."""
        wanted, found = set(map(id, stepped)), list[torch.Tensor]()
        for model in self._models:
            own = synchronisation_of(model)
            assert own is not None, "it was sharded here"
            if own.held(model):
                held = ((cut, held_gradient(cut)) for cut in own.cuts if id(cut.sharded_param) in wanted)
                found += [gradient for _, gradient in held if gradient is not None]
        return found

    @property
    def _here(self) -> Place:
        assert self._place is not None, "layout() runs in the constructor of the Accelerator"
        return self._place


class _Outdating:
    """Reshards units that are still gathered after a step: their values are old.

    That happens where a model is called between its backward and the step.
    """

    def __init__(self, models: weakref.WeakKeyDictionary[nn.Module, Sharded]) -> None:
        self._models = models

    def __call__(self, *_: Any) -> None:
        for model in self._models:
            own = synchronisation_of(model)
            assert own is not None, "it was sharded here"
            own.reshard()


def _check_count(name: str, count: object) -> None:
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise ValueError(
            f"FSDP({name}={count!r}): expected how many processes, a whole number of at least 1. Leave it out for 1."
        )
