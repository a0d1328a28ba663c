"""The strategy `xla`: SPMD over a mesh of all devices that this process sees."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from accel_checkpoint import capture_optimizer, list_misfits, restore_optimizer
from accel_core import Layout, Strategy, WorldError, hookimpl, place_model
from accel_xla.batches import Batches, ModelCalls
from accel_xla.engine import Engine, check_installed, warn_of_fallbacks, why_unusable
from accel_xla.sharding import HostMoments, ModelCopies, begin_moments, on_host, place_moments, shard_like

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from accel_core import PrecisionPolicy, PrepareRequest, Rows, World
    from accel_core.api.checkpoint import OptimizerState, SavedOptimizer
    from accel_core.api.layouts import State


class XLA(Strategy):
    """Trains in one process on all XLA devices of this machine, such as TPUs.

    Args:
        shard: number of devices that share each parameter, with its gradient and what the optimizer keeps
            of it. 1: each has all; -1: all devices of the mesh; a number in between: groups of so
            many, each with a whole model (hybrid). Batches are divided over all devices always.
    """

    distributed_type = "XLA"
    replicates_parameters = True  # this process, of all its devices together
    _engine: Engine  # from `layout` on, which runs in the constructor of the Accelerator
    _batches: Batches

    def __init__(self, shard: int = 1) -> None:
        if type(shard) is not int or (shard < 1 and shard != -1):
            raise ValueError(
                f"XLA(shard={shard!r}): expected how many devices share a parameter, 1 or more, or -1 for all."
            )
        self._shard = shard
        self._copies = ModelCopies()
        self._hooks: weakref.WeakKeyDictionary[nn.Module, tuple[Any, ...]] = weakref.WeakKeyDictionary()
        self._begun: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()  # steps so far, up to 2
        self._recorded = False  # whether a batch was given out since the last sync
        self._in_window = False  # whether a backward was recorded since
        self._fallbacks: dict[str, int] = {}

    @staticmethod
    def unusable() -> str | None:
        """The reason why it cannot be used here, as `accel plugins` shows it; None if it can."""
        return why_unusable()

    @hookimpl
    def layout(self, world: World) -> Layout:
        """All of the data: devices share each batch. Raises `WorldError` in a larger world."""
        check_installed()
        if world.local_size > 1:
            raise WorldError(
                f"strategy 'xla' was asked for, and {world.local_size} processes run on this host ({world.source}). One process "
                f"computes on all XLA devices of a host. Start one: python script.py, or accel launch --num-processes 1 script.py."
            )
        if world.size > 1:
            raise WorldError(
                f"strategy 'xla' was asked for, and {world.size} processes run ({world.source}), each on a host of its own. Training "
                f"over several hosts was never run, so it is refused. Start the script on one host."
            )
        self._engine = Engine(self._shard)
        if world.cpu_only and self._engine.kind != "CPU":
            raise WorldError(
                f"cpu=True was asked for, and strategy 'xla' computes on {self._engine.devices} {self._engine.kind} devices. Leave "
                f"cpu=True out; or set PJRT_DEVICE=CPU, to have XLA compute on the CPU."
            )
        self._batches = Batches(self._engine)
        layout = Layout.data_parallel(world)
        return Layout(layout.shard, mesh=self._engine.mesh, device=self._engine.device, place_batch=self._place_batch)

    def details(self) -> Mapping[str, str]:
        """The devices and the mesh."""
        engine = self._engine
        shape = f"{engine.devices // engine.shard} (replicate) x {engine.shard} (shard)"
        return MappingProxyType({"devices": f"{engine.devices} {engine.kind}", "mesh": shape})

    @hookimpl
    def prepare_model(self, model: nn.Module, optimizers: Sequence[Optimizer], request: PrepareRequest) -> nn.Module:  # noqa: ARG002
        """Places, casts and shards the model in place; its inputs are divided as it is called."""
        if request.compile_options is not None:
            raise ValueError(
                "dynamo_backend was given, and strategy 'xla' compiles every model by itself. Leave it out (dynamo_backend='no')."
            )
        _check_policy(request.policy)
        place_model(model, request)
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if tensor.device.type != "xla":
                raise ValueError(
                    f"{type(model).__name__} was prepared without device placement, and {name!r} is on {str(tensor.device)!r}. Move "
                    f"the model to accelerator.device first, or leave device_placement=False out."
                )
            if isinstance(tensor, torch.nn.Parameter):
                shard_like(self._engine, tensor)
        self._engine.sync()
        calls = ModelCalls(self._batches, self._run_evaluation)
        self._hooks[model] = (
            model.register_forward_pre_hook(calls.before, with_kwargs=True),
            model.register_forward_hook(calls.after),
        )
        return model

    @hookimpl
    def release_model(self, model: nn.Module, prepared: nn.Module) -> None:  # noqa: ARG002
        """Takes the hooks off the model."""
        for handle in self._hooks.pop(model, ()):
            handle.remove()

    @hookimpl
    def backward(self, loss: torch.Tensor, weight: float, options: dict[str, Any]) -> None:
        """Records a backward; it runs at the end of the window, with the step."""
        self._in_window = True
        try:
            (loss if weight == 1.0 else loss * weight).backward(**options)
        except RuntimeError as error:
            if "device_ready_queues_" not in str(error):
                raise
            raise RuntimeError(
                "This process ran a backward before its first Accelerator(strategy='xla') was made, and torch's autograd looks for "
                "devices in the first backward only. Make the Accelerator before anything is trained."
            ) from error

    @hookimpl
    def apply_step(self, optimizer: Optimizer, step: Callable[[], Any]) -> Any:
        """Takes a step, and runs all that was recorded since the last one: one graph for a window."""
        steps = self._begun.get(optimizer, 0)
        if not steps:
            begin_moments(self._engine, optimizer)
            place_moments(self._engine, optimizer)
        result = step()
        if not steps:
            place_moments(self._engine, optimizer)
        self._run()
        if steps < 2:
            self._begun[optimizer] = steps + 1
            self._find_fallbacks()
        return result

    @hookimpl
    def model_state(self, model: nn.Module) -> State:
        """Copies on the host, which `model_loaded` puts back."""
        return self._copies.capture(self._engine, model)

    @hookimpl
    def model_loaded(self, model: nn.Module) -> None:
        """Puts what was read on the mesh."""
        self._copies.load(self._engine, model)

    @hookimpl
    def optimizer_state(self, optimizer: Optimizer, names: Mapping[int, str]) -> OptimizerState:
        """Copies on the host."""
        state = capture_optimizer(optimizer, names, HostMoments(self._engine))
        state.entries.update(dict(on_host(self._engine, state.entries)))
        return state

    @hookimpl
    def optimizer_misfits(self, optimizer: Optimizer, names: Mapping[int, str], saved: SavedOptimizer) -> list[str]:
        return list_misfits(optimizer, names, HostMoments(self._engine), saved)

    @hookimpl
    def load_optimizer_state(self, optimizer: Optimizer, names: Mapping[int, str], saved: SavedOptimizer) -> None:
        """Reads state into the host; it moves to the mesh before the next step."""
        restore_optimizer(optimizer, names, HostMoments(self._engine), saved)
        self._begun.pop(optimizer, None)

    def _place_batch(self, batch: Any, rows: Rows | None, remaining: int | None, by: object) -> tuple[Any, Rows | None]:
        # An evaluation takes no steps, and would be recorded to its end as one graph; what belongs to a window goes on.
        if self._recorded and not self._in_window:
            self._run()
        self._recorded = True
        return self._batches.place(batch, rows, remaining, by)

    def _run_evaluation(self) -> None:
        if not self._in_window:
            self._run()

    def _run(self) -> None:
        self._engine.sync()
        self._recorded = self._in_window = False

    def _find_fallbacks(self) -> None:
        found = self._engine.fallbacks()
        new = {name: count - self._fallbacks.get(name, 0) for name, count in found.items()}
        self._fallbacks = found
        if any(new.values()):
            warn_of_fallbacks({name: count for name, count in new.items() if count})


def _check_policy(policy: PrecisionPolicy) -> None:
    """Raises `ValueError` for dtypes that do not hold under XLA."""
    dtypes = (policy.param, policy.compute, policy.reduce)
    if torch.float16 in dtypes:
        raise ValueError(
            "A precision in float16 was asked for, which XLA devices do not train in. Take mixed_precision='bf16'."
        )
    if policy.reduce not in (None, policy.param or torch.float32):
        raise ValueError(
            f"Gradients were to travel in {policy.reduce}, and XLA adds them in the dtype of their parameters. Leave reduce out."
        )
