"""Distributed data parallelism over `torch.nn.parallel.DistributedDataParallel`."""

from __future__ import annotations

import re
import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from accel_core.base.class_override import ClassOverride, override_class
from accel_core.base.errors import WorldError
from accel_core.base.vocabulary import SEVERAL_PROCESSES
from accel_core.contract.hook_specs import hookimpl
from accel_core.contract.strategy import Layout, Strategy
from accel_core.options.handlers import KwargsHandler
from accel_core.processes.watch.collective_scope import explain
from accel_core.processes.world import World
from accel_core.strategies.gradient_sync import SYNC, GradientSync, check, left_out_of_loss, sync_of
from accel_core.strategies.placement import check_alike, place_model

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from accel_core.contract.precision_policy import PrecisionPolicy
    from accel_core.loop.preparation import PrepareRequest

CommHook = Literal["no", "fp16", "bf16", "power_sgd"]
CommWrapper = Literal["no", "fp16", "bf16"]


@dataclass
class DistributedDataParallelKwargs(KwargsHandler):
    """Options of `DDP`: `Accelerator(kwargs_handlers=[DistributedDataParallelKwargs(...)])`."""

    broadcast_buffers: bool = True
    bucket_cap_mb: float | None = None
    find_unused_parameters: bool = False
    gradient_as_bucket_view: bool = True
    static_graph: bool = False
    comm_hook: CommHook = "no"
    comm_wrapper: CommWrapper = "no"
    comm_state_option: dict[str, Any] = field(default_factory=dict)


class DDP(Strategy):
    """Distributed data parallelism: a whole copy of the model in each process, gradients averaged.

    Args:
        broadcast_buffers: take buffers from process 0 at each synchronising forward pass.
        bucket_cap_mb: size in MiB of the buckets in which gradients are exchanged; None: torch's.
        find_unused_parameters: allow parameters that take no part in a backward pass. Slower.
        gradient_as_bucket_view: let gradients share memory with the buckets, by default here.
        static_graph: promise that every iteration uses the same parameters in the same way.
        comm_hook: form in which gradients travel: as they are ("no"), fp16, bf16, or by PowerSGD.
        comm_wrapper: number format in which the factors of PowerSGD are exchanged.
        comm_state_option: settings of PowerSGD. Its errors are in no checkpoint: a resumed run has none.
    """

    handler = DistributedDataParallelKwargs
    distributed_type = SEVERAL_PROCESSES
    replicates_parameters = True
    _world: World  # from `layout` on, which runs in the constructor of the Accelerator

    def __init__(
        self,
        broadcast_buffers: bool = True,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        gradient_as_bucket_view: bool = True,
        static_graph: bool = False,
        comm_hook: CommHook = "no",
        comm_wrapper: CommWrapper = "no",
        comm_state_option: dict[str, Any] | None = None,
    ) -> None:
        if comm_hook != "power_sgd" and (comm_state_option or comm_wrapper != "no"):
            what = f"DDP(comm_wrapper={comm_wrapper!r}, comm_state_option={comm_state_option!r}) configures PowerSGD,"
            raise ValueError(f"{what} but comm_hook is {comm_hook!r}. Add comm_hook='power_sgd', or leave them out.")
        self._options: dict[str, Any] = {
            "bucket_cap_mb": bucket_cap_mb,
            "find_unused_parameters": find_unused_parameters,
            "gradient_as_bucket_view": gradient_as_bucket_view,
            "static_graph": static_graph,
        }
        self._broadcast_buffers = broadcast_buffers
        self._communication: tuple[str, str, dict[str, Any]] = comm_hook, comm_wrapper, comm_state_option or {}
        self._wrappers: list[weakref.ref[DistributedDataParallel]] = []

    @hookimpl
    def layout(self, world: World) -> Layout:
        """Pure data parallelism. Raises `WorldError` in a world of one."""
        if world.group is None:
            what = f"strategy 'ddp' was asked for, but this process is alone ({world.source}). Start the script"
            raise WorldError(f"{what} with `torchrun --nproc-per-node 2 script.py`, or leave strategy= out.")
        self._world = world
        return Layout.data_parallel(world)

    @hookimpl
    def prepare_model(self, model: nn.Module, optimizers: Sequence[Optimizer], request: PrepareRequest) -> nn.Module:  # noqa: ARG002
        """Places, casts, compiles the model in place; wraps it, unless frozen or only evaluated."""
        # The model is compiled, and not the wrapper: torch splits what it compiles inside a wrapper at the borders of the
        # buckets, so that gradients still travel while the backward goes on.
        trains = not request.evaluation and any(parameter.requires_grad for parameter in model.parameters())
        is_bare = trains and not isinstance(model, DistributedDataParallel)
        if is_bare:
            check_alike(model, self._world)
        place_model(model.module if isinstance(model, DistributedDataParallel) else model, request)
        if is_bare:
            model = self._wrap(model, request.policy)
        if isinstance(model, DistributedDataParallel) and not request.evaluation:
            override_class(model, _Wrapper)
            if sync_of(model) is None:
                vars(model)[SYNC] = GradientSync(model)
            if not any(reference() is model for reference in self._wrappers):
                self._wrappers.append(weakref.ref(model, self._wrappers.remove))
        return model

    @hookimpl
    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        return _NoSync(model)

    @hookimpl
    @contextmanager
    def trigger_sync_in_backward(self, model: Any) -> Iterator[None]:
        if not isinstance(model, DistributedDataParallel):
            yield
            return
        if model.find_unused_parameters:
            raise ValueError(
                "trigger_sync_in_backward() was called under DDP with find_unused_parameters=True, which finds them in "
                "a forward that synchronises. Run the last forward outside no_sync(), or leave the option out."
            )
        before = model.require_backward_grad_sync, model.require_forward_param_sync
        model.require_backward_grad_sync = model.require_forward_param_sync = True
        model.reducer.prepare_for_backward([])
        if (sync := sync_of(model)) is not None:
            sync.announce(model)
        try:
            yield
        finally:
            model.require_backward_grad_sync, model.require_forward_param_sync = before

    @hookimpl
    def synchronise_gradients(self) -> None:
        """Averages gradients of a second backward through a graph, which torch leaves local."""
        for wrapper, sync in self._watched():
            if not sync.is_first_backward:
                sync.settle(wrapper)
                if sync.in_doubt():
                    sync.average(wrapper, self._world)

    @hookimpl
    def check_gradients(self, optimizer: Optimizer) -> None:
        """Raises for gradients that no backward has averaged, naming their parameters."""
        watched = self._watched()
        for wrapper, sync in watched:
            sync.settle(wrapper)
            sync.averaged = False  # the next window has to average by itself
        if any([sync.in_doubt() for _, sync in watched]):
            check(optimizer, watched)

    @hookimpl
    def release_model(self, prepared: nn.Module) -> None:
        _stop_watching(prepared)

    def _watched(self) -> list[tuple[DistributedDataParallel, GradientSync]]:
        wrappers = [wrapper for reference in self._wrappers if (wrapper := reference()) is not None]
        return [(wrapper, sync) for wrapper in wrappers if (sync := sync_of(wrapper)) is not None]

    def _wrap(self, model: nn.Module, policy: PrecisionPolicy) -> DistributedDataParallel:
        device, group = next(model.parameters()).device, self._world.group
        name, compression, state = self._communication
        devices = None if device.type == "cpu" else [device]
        wrapper: Any = DistributedDataParallel(model, devices, process_group=group, **self._options)
        # Not as an argument, which has another name in torch 2.13; and 2.9 would not make buffers equal at the start either.
        wrapper.broadcast_buffers = self._broadcast_buffers
        trained = {each.dtype for each in model.parameters() if each.requires_grad and each.is_floating_point()}
        if policy.reduce is not None and (trained - {policy.reduce} or {name, compression} & {"fp16", "bf16"}):
            wanted = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}.get(policy.reduce)
            if wanted is None or name not in ("no", wanted):
                raise ValueError(
                    f"The precision asks for gradients that travel as {policy.reduce}, but DDP has comm_hook={name!r}. Leave "
                    f"it out for float16, bfloat16 and float32; other dtypes DDP cannot reduce in."
                )
            name = wanted
        if name != "no":
            wrapper.register_comm_hook(*_comm_hook(name, compression, state, group))
        self._world.close_before_end(override_class(wrapper, _Wrapper))
        return wrapper  # type: ignore[no-any-return]


_ENDED = "its process group had ended by end_training(). Use the model inside it, accelerator.unwrap_model(model)."


class _Wrapper(ClassOverride):
    """Additions to torch's wrapper: the model's attributes, names of unused parameters, `close`."""

    def __getattr__(self, name: str) -> Any:
        """Those of the wrapper; and what the user's model has, unless it is private."""
        modules = vars(self).get("_modules", {})
        if name in modules:
            return modules[name]
        if name.startswith("_") or "module" not in modules:
            return super().__getattr__(name)  # type: ignore[misc]
        return getattr(modules["module"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        own = vars(self)
        if type(value) is bool and name in own:
            own[name] = value  # torch sets one in every forward, and its way to the same takes microseconds
            return
        inner = None if name in own else own.get("_modules", {}).get("module")
        if inner is not None and not hasattr(type(self), name) and name[0] != "_" and hasattr(inner, name):
            setattr(inner, name, value)
        else:
            super().__setattr__(name, value)

    def __getstate__(self) -> Any:
        if vars(self)["_comm_hooks"]:
            what = "This DDP model was to be copied or pickled, but torch would not copy its communication hook."
            raise TypeError(f"{what} Copy the model inside it, accelerator.unwrap_model(model), and prepare that.")
        if "reducer" not in vars(self):
            raise RuntimeError(f"This DDP model was to be copied or pickled after {_ENDED}")
        state: Any = super().__getstate__()  # type: ignore[misc,unused-ignore]  # of `object`, from Python 3.11 on
        state.pop(SYNC, None)  # a copy is not prepared
        return state

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state)  # type: ignore[misc]
        World.current().close_before_end(self)  # the copy has a reducer of its own

    def close(self) -> None:
        """Drops the reducer, as a process that exits with a live one may abort."""
        _stop_watching(self)
        for name in ("reducer", "logger"):
            vars(self).pop(name, None)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Raises, naming the parameters that took no part in the loss; torch gives indices."""
        sync = sync_of(self) if torch.is_grad_enabled() else None
        if sync is not None and sync.is_thawed():
            sync = _renew_reducer(self, sync)
        try:
            output = super().forward(*args, **kwargs)  # type: ignore[misc]
        except (AttributeError, RuntimeError) as error:
            if "reducer" not in vars(self):
                raise RuntimeError(f"This DDP model was called after {_ENDED}") from error
            if found := re.search(r"did not receive grad for rank \d+: ([\d ]+)", str(error)):
                names = [name for name, each in self.module.named_parameters() if each.requires_grad]
                left_out = [names[int(index)] for index in found[1].split()]
                raise RuntimeError(left_out_of_loss(left_out, "the previous iteration")) from error
            explain(error)
            raise
        if sync is not None:
            if self.require_backward_grad_sync:
                sync.announce(self)  # type: ignore[arg-type]
            else:
                sync.withheld = True
        return output


def _stop_watching(wrapper: Any) -> None:
    sync = vars(wrapper).pop(SYNC, None)
    if sync is not None:
        sync.close()


def _renew_reducer(wrapper: Any, sync: GradientSync) -> GradientSync:
    """Has gradients of unfrozen parameters averaged: by a new reducer, as torch makes a copy's."""
    if any(hasattr(state, "error_dict") for _, state in wrapper._comm_hooks):
        raise RuntimeError(
            f"{sum(each.requires_grad for each in sync.frozen)} parameters were unfrozen after prepare(), and "
            f"comm_hook='power_sgd' has an error of each of the others by its place. Unfreeze before prepare(); or "
            f"call accelerator.free_memory(), and prepare the model and its optimizer again."
        )
    sync.settle(wrapper)
    wrapper._remove_autograd_hooks()
    parameters, sparse = wrapper._build_params_for_reducer()
    names = wrapper._build_debug_param_to_name_mapping(parameters)
    wrapper._ddp_init_helper(parameters, sparse, names, wrapper.static_graph)
    if wrapper.static_graph:
        wrapper._static_graph_delay_allreduce_enqueued = False
        wrapper.reducer._set_static_graph()
    for hook, state in wrapper._comm_hooks:
        dist._register_comm_hook(wrapper.reducer, state, hook)
    renewed = vars(wrapper)[SYNC] = GradientSync(wrapper, sync)
    return renewed


@dataclass(slots=True)
class _NoSync:
    """The effect of DDP's own `no_sync`, without its generator: this runs in every micro-batch."""

    model: Any
    before: bool = True

    def __enter__(self) -> None:
        model = self.model
        if not isinstance(model, DistributedDataParallel):
            return  # frozen, or prepared for evaluation only
        self.before = model.require_backward_grad_sync
        # A static graph learns its order in the first backward, which has to synchronise. That changes no result: the
        # mean over the ranks of a mean over the ranks is the same.
        if not (model.static_graph and not model._static_graph_delay_allreduce_enqueued):
            model.require_backward_grad_sync = False

    def __exit__(self, *raised: object) -> None:
        if isinstance(self.model, DistributedDataParallel):
            self.model.require_backward_grad_sync = self.before


def _comm_hook(name: str, wrapper: str, options: dict[str, Any], group: Any) -> tuple[Any, Any]:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    if name != "power_sgd":
        state, hook = group, _float32_hook if name == "fp32" else getattr(default_hooks, f"{name}_compress_hook")
    else:
        state, hook = powerSGD_hook.PowerSGDState(group, **options), powerSGD_hook.powerSGD_hook
    if wrapper != "no":
        hook = getattr(default_hooks, f"{wrapper}_compress_wrapper")(hook)
    # torch knows its bf16 hooks by their names and refuses them where it sees no native bf16 collective, although the
    # reduction works there. Hence another name; and no annotations, which torch compares by identity.
    return state, lambda state, bucket: hook(state, bucket)  # noqa: PLW0108


def _float32_hook(group: Any, bucket: Any) -> Any:  # divides behind the sum, so that a mean is rounded once
    buffer = bucket.buffer()
    sent = dist.all_reduce(buffer.float(), group=group, async_op=True).get_future()
    return sent.then(lambda done: buffer.copy_(done.value()[0].div_(group.size())))
