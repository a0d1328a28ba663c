"""The component `neutral`: what the core finds under the default name of checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from torch import nn

from accel_checkpoint.assembling import WeightGather
from accel_checkpoint.checkpoints import Checkpoints
from accel_checkpoint.collective_steps import on_each_rank
from accel_checkpoint.model_state import capture_model
from accel_checkpoint.optimizers.optimizer_state import capture_optimizer, list_misfits, restore_optimizer
from accel_checkpoint.optimizers.sharding import Whole
from accel_checkpoint.weights import saving
from accel_checkpoint.weights.exporting import export_weights
from accel_checkpoint.weights.loading import load_checkpoint_in_model
from accel_core import hookimpl

if TYPE_CHECKING:
    import os

    from torch.optim import Optimizer

    from accel_core import World
    from accel_core.api.checkpoint import Asynchronous, OptimizerState, Run, SavedOptimizer
    from accel_core.api.layouts import State


class NeutralCheckpoints:
    """Saves a run under names of no strategy (`accel_core.api.checkpoint.CheckpointComponent`)."""

    capture_model = staticmethod(capture_model)
    export_weights = staticmethod(export_weights)
    load_checkpoint_in_model = staticmethod(load_checkpoint_in_model)

    def __init__(self) -> None:
        self._checkpoints: WeakKeyDictionary[Run, Checkpoints] = WeakKeyDictionary()

    @hookimpl
    def save_checkpoint(self, run: Run, folder: str | os.PathLike[str] | None, asynchronous: Asynchronous) -> str:
        """Saves, or begins to, and returns the folder."""
        return self._of(run).save(folder, asynchronous)

    @hookimpl
    def load_checkpoint(self, run: Run, folder: str | os.PathLike[str] | None, missing_ok: bool = False) -> bool:
        """Restores the run, or changes nothing. Returns whether there was a checkpoint."""
        return self._of(run).load(folder, missing_ok)

    @hookimpl
    def wait_for_checkpoint(self, run: Run) -> None:
        """Returns when the save that is under way is published."""
        if run in self._checkpoints:
            self._checkpoints[run].wait()

    def capture_optimizer(self, optimizer: Optimizer, names: Mapping[int, str]) -> OptimizerState:
        """Parameters are whole."""
        return capture_optimizer(optimizer, names, Whole())

    def optimizer_problems(self, optimizer: Optimizer, names: Mapping[int, str], saved: SavedOptimizer) -> list[str]:
        """Parameters are whole."""
        return list_misfits(optimizer, names, Whole(), saved)

    def restore_optimizer(self, optimizer: Optimizer, names: Mapping[int, str], saved: SavedOptimizer) -> None:
        """Parameters are whole."""
        restore_optimizer(optimizer, names, Whole(), saved)

    def gather_state_dict(self, present: Callable[[], State], world: World, prefix: str) -> dict[str, Any]:
        """All of it in the CPU memory of the main process, and nothing on the others."""
        gathering = _gathering(present, world, prefix)
        return gathering.together("get_state_dict()", gathering.all) or {}

    def save_weights(
        self,
        weights: nn.Module | Callable[[], State],
        directory: str | os.PathLike[str],
        max_shard_size: int | str,
        safe_serialization: bool,
        world: World,
        prefix: str = "",
    ) -> None:
        """Writes plain files on the main process."""
        source = weights if isinstance(weights, nn.Module) else _gathering(weights, world, prefix)
        saving.save_weights(source, directory, max_shard_size, safe_serialization, world)

    def save_object(
        self, obj: Any, f: str | os.PathLike[str], safe_serialization: bool, world: World, save_on_each_node: bool
    ) -> None:
        """Writes one object on the main process, or on that of each node."""
        saving.save(obj, f, safe_serialization, world=world, save_on_each_node=save_on_each_node)

    def _of(self, run: Run) -> Checkpoints:
        if run not in self._checkpoints:
            self._checkpoints[run] = Checkpoints(run)
        return self._checkpoints[run]


def _gathering(present: Callable[[], State], world: World, prefix: str) -> WeightGather:
    return WeightGather(on_each_rank(world, "for weights to be presented", present), world, prefix)
