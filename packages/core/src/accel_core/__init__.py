"""One PyTorch training loop for any hardware and any engine: see `Accelerator`."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any

from accel_core.accelerator import Accelerator
from accel_core.base.errors import (
    CheckpointError,
    CollectiveMismatchError,
    NonFiniteError,
    NotInstalledError,
    PluginError,
    RecordRefusedError,
    TrackerError,
    WorldError,
)
from accel_core.base.vocabulary import ELSEWHERE, DistributedType, DynamoBackend, LoggerType, PrecisionType, RNGType
from accel_core.collectives.run_seed import set_seed
from accel_core.contract.hook_specs import hookimpl
from accel_core.contract.loader_progress import Feed, Passage, Rows
from accel_core.contract.precision_policy import Precision, PrecisionPolicy
from accel_core.contract.strategy import Layout, Shard
from accel_core.loop.optimizer_gate import SKIPPED
from accel_core.loop.preparation import PrepareRequest
from accel_core.options.handlers import (
    AutocastKwargs,
    GradientAccumulationPlugin,
    InitProcessGroupKwargs,
    KwargsHandler,
    ProjectConfiguration,
    TorchDynamoPlugin,
    TrackingKwargs,
)
from accel_core.processes.logs import get_logger
from accel_core.processes.world import World
from accel_core.state import AcceleratorState, PartialState
from accel_core.strategies import DDP, DistributedDataParallelKwargs, Single, Strategy, place_model

if TYPE_CHECKING:
    from accel_core.collectives.operations import (
        broadcast,
        broadcast_object_list,
        gather,
        gather_object,
        pad_across_processes,
        pad_input_tensors,
        reduce,
        synchronize_rng_state,
        synchronize_rng_states,
        wait_for_everyone,
    )
    from accel_core.facade.accelerated import AcceleratedOptimizer, AcceleratedScheduler
    from accel_core.loop.local_sgd import LocalSGD
    from accel_core.loop.memory import clear_device_cache, find_executable_batch_size, release_memory
    from accel_core.loop.profiling import ProfileKwargs
    from accel_core.tracking.tracker import GeneralTracker, TrackedRun, Tracker, TrackerHandle
    from accel_core.tracking.values import Bins, Histogram, Table

    export_weights: Callable[..., Any]
    load_checkpoint_in_model: Callable[..., None]

__all__ = [
    "DDP", "SKIPPED", "AcceleratedOptimizer", "AcceleratedScheduler", "Accelerator", "AcceleratorState",
    "AutocastKwargs", "Bins", "CheckpointError", "CollectiveMismatchError", "DistributedDataParallelKwargs",
    "DistributedType", "DynamoBackend", "Feed", "GeneralTracker", "GradientAccumulationPlugin", "Histogram",
    "InitProcessGroupKwargs", "KwargsHandler", "Layout", "LocalSGD", "LoggerType", "NonFiniteError",
    "NotInstalledError", "PartialState", "Passage", "PluginError", "Precision", "PrecisionPolicy", "PrecisionType",
    "PrepareRequest", "ProfileKwargs", "ProjectConfiguration", "RNGType", "RecordRefusedError", "Rows", "Shard",
    "Single", "Strategy", "Table", "TorchDynamoPlugin", "TrackedRun", "Tracker", "TrackerError", "TrackerHandle",
    "TrackingKwargs", "World", "WorldError", "broadcast", "broadcast_object_list", "clear_device_cache",
    "export_weights", "find_executable_batch_size", "gather", "gather_object", "get_logger", "hookimpl",
    "load_checkpoint_in_model", "pad_across_processes", "pad_input_tensors", "place_model", "reduce",
    "release_memory", "set_seed", "synchronize_rng_state", "synchronize_rng_states", "wait_for_everyone",
]  # fmt: skip

__version__ = "0.1.0"

# Looked up when they are used: most scripts use none of them, and importing them all would double the time of the import.
_LAZY = {
    "collectives.operations": (
        "broadcast broadcast_object_list gather gather_object pad_across_processes pad_input_tensors reduce "
        "synchronize_rng_state synchronize_rng_states wait_for_everyone"
    ),
    "facade.accelerated": "AcceleratedOptimizer AcceleratedScheduler",
    "loop.local_sgd": "LocalSGD",
    "loop.memory": "clear_device_cache find_executable_batch_size release_memory",
    "loop.profiling": "ProfileKwargs",
    "tracking.tracker": "GeneralTracker TrackedRun Tracker TrackerHandle",
    "tracking.values": "Bins Histogram Table",
}
_MODULES = {name: module for module, names in _LAZY.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name in ELSEWHERE:
        distribution = ELSEWHERE[name]
        what = f"module {__name__!r} has no attribute {name!r}: it is in {distribution}. Write `from"
        how = import_module(f"{__name__}.base.installation").how_to_install(distribution)
        raise AttributeError(f"{what} {distribution.replace('-', '_')} import {name}`. If that is missing: {how}")
    if name in ("export_weights", "load_checkpoint_in_model"):
        return _of_checkpoints(name)
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    return found


def _of_checkpoints(name: str) -> Any:
    defaults = import_module(f"{__name__}.facade.default_hooks").CoreDefaults()
    try:
        return getattr(defaults.checkpoints(f"{name}()"), name)
    except (PluginError, AttributeError) as error:
        missing = error

        def function(*_: Any, **__: Any) -> Any:
            raise missing  # when it is called: `import *`, and whoever looks at all names, asks for it too

        return function


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
