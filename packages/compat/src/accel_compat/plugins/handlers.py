"""Options for `kwargs_handlers`, apart from those of fp8."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import accel_core
import accel_precision
from accel_compat.plugins.enums import DDPCommunicationHookType, DynamoBackend
from accel_compat.plugins.variables import fill, flag, variable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn


@dataclass
class KwargsHandler(accel_core.KwargsHandler):
    """Base of the option classes. A subclass of a script's own is handed on as it is."""

    def to_dict(self) -> dict[str, Any]:
        """All options, in a copy."""
        return copy.deepcopy(vars(self))

    def to_kwargs(self) -> dict[str, Any]:
        """The options that differ from the defaults of the class, without the environment."""
        with without_environment():
            defaults = type(self)().to_dict()
        return {name: value for name, value in self.to_dict().items() if defaults[name] != value}

    def ours(self) -> accel_core.KwargsHandler | None:
        """The object that our packages take; None: there is nothing to say."""
        return self


@contextmanager
def without_environment() -> Iterator[None]:
    """Takes all variables away for the block."""
    kept = dict(os.environ)
    os.environ.clear()
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(kept)


def _as(kind: Callable[..., Any], handler: object, *without: str) -> Any:
    given = {each.name: getattr(handler, each.name) for each in fields(handler)}  # type: ignore[arg-type]  # a dataclass
    return kind(**{name: value for name, value in given.items() if name not in without})


@dataclass
class AutocastKwargs(KwargsHandler):
    """Options of `Accelerator.autocast`."""

    enabled: bool = True
    cache_enabled: bool | None = None

    def ours(self) -> accel_core.AutocastKwargs:
        """Options of our autocast."""
        handler: accel_core.AutocastKwargs = _as(accel_core.AutocastKwargs, self)
        return handler


@dataclass
class DistributedDataParallelKwargs(KwargsHandler):
    """Options of torch's `DistributedDataParallel`. `dim` and `check_reduction` have no effect there either."""

    dim: int = 0
    broadcast_buffers: bool = True
    bucket_cap_mb: int = 25
    find_unused_parameters: bool = False
    check_reduction: bool = False
    gradient_as_bucket_view: bool = False
    static_graph: bool = False
    comm_hook: DDPCommunicationHookType = DDPCommunicationHookType.NO
    comm_wrapper: DDPCommunicationHookType = DDPCommunicationHookType.NO
    comm_state_option: dict[str, Any] = field(default_factory=dict)

    def to_dict(
        self, ignore_keys: tuple[str, ...] = ("comm_hook", "comm_wrapper", "comm_state_option")
    ) -> dict[str, Any]:
        """The options of the wrapper, without those of the hook."""
        return {name: value for name, value in super().to_dict().items() if name not in ignore_keys}

    def ours(self) -> accel_core.DistributedDataParallelKwargs:
        """Options of our DDP. What only PowerSGD takes is left out without it."""
        hook, wrapper = DDPCommunicationHookType(self.comm_hook), DDPCommunicationHookType(self.comm_wrapper)
        if hook is DDPCommunicationHookType.BATCHED_POWER_SGD:
            raise ValueError("comm_hook='batched_power_sgd' is not offered. Write comm_hook='power_sgd'.")
        sgd = hook is DDPCommunicationHookType.POWER_SGD
        return accel_core.DistributedDataParallelKwargs(
            broadcast_buffers=self.broadcast_buffers,
            bucket_cap_mb=None
            if self.bucket_cap_mb == 25
            else self.bucket_cap_mb,  # the default, with a small first one
            find_unused_parameters=self.find_unused_parameters,
            gradient_as_bucket_view=self.gradient_as_bucket_view,
            static_graph=self.static_graph,
            comm_hook=hook.value,
            comm_wrapper=wrapper.value if sgd else "no",  # type: ignore[arg-type]  # checked there
            comm_state_option=dict(self.comm_state_option) if sgd else {},
        )

    def register_comm_hook(self, model: nn.Module) -> None:
        """Registers the hook at a model that torch's `DistributedDataParallel` wraps."""
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

        hook, wrapper = DDPCommunicationHookType(self.comm_hook), DDPCommunicationHookType(self.comm_wrapper)
        if hook is DDPCommunicationHookType.NO:
            return
        sgd = "power" in hook.value
        function: Any = getattr(
            powerSGD_hook if sgd else default_hooks,
            f"{hook.value.replace('sgd', 'SGD')}{'_hook' if sgd else '_compress_hook'}",
        )
        if wrapper is not DDPCommunicationHookType.NO:
            function = getattr(default_hooks, f"{wrapper.value}_compress_wrapper")(function)
        state = powerSGD_hook.PowerSGDState(None, **self.comm_state_option) if sgd else None
        model.register_comm_hook(state, function)  # type: ignore[operator]  # a DistributedDataParallel


@dataclass
class GradScalerKwargs(KwargsHandler):
    """Options of dynamic loss scaling."""

    init_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    enabled: bool = True

    def ours(self) -> accel_precision.GradScalerKwargs:
        """Options of our loss scaling."""
        handler: accel_precision.GradScalerKwargs = _as(accel_precision.GradScalerKwargs, self)
        return handler


@dataclass
class InitProcessGroupKwargs(KwargsHandler):
    """Options for the start of the process group. "nccl" stands for the backend that fits the device."""

    backend: str | None = "nccl"
    init_method: str | None = None
    timeout: timedelta | None = None

    def __post_init__(self) -> None:
        if self.timeout is None:
            self.timeout = timedelta(seconds=600 if self.backend == "nccl" else 1800)

    def ours(self) -> accel_core.InitProcessGroupKwargs:
        """What differs from the defaults."""
        return accel_core.InitProcessGroupKwargs(**self.to_kwargs())


@dataclass
class ProfileKwargs(accel_core.ProfileKwargs, KwargsHandler):
    """Options of `Accelerator.profile`; ours are the same."""

    def ours(self) -> accel_core.ProfileKwargs:
        """Our options."""
        return _as(accel_core.ProfileKwargs, self)  # type: ignore[no-any-return]


@dataclass
class GradientAccumulationPlugin(KwargsHandler):
    """Options of gradient accumulation. `adjust_scheduler` has no effect on learning rates, as ever."""

    num_steps: int | None = None
    adjust_scheduler: bool = True
    sync_with_dataloader: bool = True
    sync_each_batch: bool = False

    def ours(self) -> accel_core.GradientAccumulationPlugin:
        """Our options; a short last window is divided by the number of steps, too."""
        return accel_core.GradientAccumulationPlugin(
            num_steps=1 if self.num_steps is None else self.num_steps,
            sync_with_dataloader=self.sync_with_dataloader,
            sync_each_batch=self.sync_each_batch,
            mean_over="steps",
        )


@dataclass
class TorchDynamoPlugin(KwargsHandler):
    """Options of `torch.compile`; the backend is "no" unless it is given, here or by a variable."""

    backend: Any = variable("ACCELERATE_DYNAMO_BACKEND", str, "no")
    mode: str | None = variable("ACCELERATE_DYNAMO_MODE", str, "default")
    fullgraph: bool | None = variable("ACCELERATE_DYNAMO_USE_FULLGRAPH", flag, False)
    dynamic: bool | None = variable("ACCELERATE_DYNAMO_USE_DYNAMIC", flag)
    options: Any = None
    disable: bool = False
    use_regional_compilation: bool | None = variable("ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION", flag, False)

    def __post_init__(self) -> None:
        fill(self)
        if isinstance(self.backend, str):
            self.backend = DynamoBackend(self.backend)

    def to_dict(self) -> dict[str, Any]:
        """All options; the backend as `torch.compile` writes it."""
        name = self.backend.value.lower() if isinstance(self.backend, DynamoBackend) else self.backend
        return {**copy.deepcopy(vars(self)), "backend": name}

    def to_kwargs(self) -> dict[str, Any]:
        """Arguments of `torch.compile`."""
        return {name: value for name, value in super().to_kwargs().items() if name != "use_regional_compilation"}

    def ours(self) -> accel_core.TorchDynamoPlugin | None:
        """Options of our compiler; None: nothing is compiled."""
        if self.backend is DynamoBackend.NO:
            return None
        options = self.to_dict()
        if options["mode"] == "default":
            options["mode"] = None  # torch refuses any mode beside options
        return accel_core.TorchDynamoPlugin(**options)
