"""The component for checkpoints and weights where no plugin serves them, under a default name.

The core asks for it when it is first needed, and imports nothing before that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, Protocol

if TYPE_CHECKING:
    import os

    from torch import nn
    from torch.optim import Optimizer

    from accel_core.contract.optimizer_state import OptimizerState, SavedOptimizer
    from accel_core.contract.tensor_layouts import State
    from accel_core.loop.run import Asynchronous, Run
    from accel_core.processes.world import World

GROUP: Final = "accel.checkpoints"
NAME: Final = "neutral"
"""The group of entry points, and the default name in it."""


class CheckpointComponent(Protocol):
    """Made without arguments, once for each Accelerator that needs it.

    The first three are the hooks of these names; the four after them serve strategies that
    replicate parameters.
    """

    def save_checkpoint(self, run: Run, folder: str | os.PathLike[str] | None, asynchronous: Asynchronous) -> str:
        """The hook."""

    def load_checkpoint(self, run: Run, folder: str | os.PathLike[str] | None) -> None:
        """The hook."""

    def wait_for_checkpoint(self, run: Run) -> None:
        """The hook."""

    def capture_model(self, model: nn.Module) -> State:
        """The entries of a model of which every rank has all."""

    def capture_optimizer(self, optimizer: Optimizer, names: Mapping[int, str]) -> OptimizerState:
        """The state of an optimizer whose parameters are whole."""

    def optimizer_problems(self, optimizer: Optimizer, names: Mapping[int, str], saved: SavedOptimizer) -> list[str]:
        """The reasons why such an optimizer cannot be given what was saved, one line each."""

    def restore_optimizer(self, optimizer: Optimizer, names: Mapping[int, str], saved: SavedOptimizer) -> None:
        """Gives such an optimizer what was saved."""

    def gather_state_dict(self, present: Callable[[], State], world: World, prefix: str) -> dict[str, Any]:
        """See `Accelerator.get_state_dict`: of what `present` gives on each rank, all of what begins with `prefix`. A collective."""

    def save_weights(
        self,
        weights: nn.Module | Callable[[], State],
        directory: str | os.PathLike[str],
        max_shard_size: int | str,
        safe_serialization: bool,
        world: World,
        prefix: str = "",
    ) -> None:
        """See `Accelerator.save_model`: of a model that is whole, or of what a function presents on each rank. A collective."""

    def save_object(
        self, obj: Any, f: str | os.PathLike[str], safe_serialization: bool, world: World, save_on_each_node: bool
    ) -> None:
        """See `Accelerator.save`. No collective."""

    def load_checkpoint_in_model(self, model: nn.Module, checkpoint: str | os.PathLike[str]) -> None:
        """Reads weights into a model, all of them or it raises. No collective."""

    def export_weights(self, source: str | os.PathLike[str], directory: str | os.PathLike[str]) -> Any:
        """Writes the weights of a checkpoint, or of other files, as plain safetensors. No collective."""
