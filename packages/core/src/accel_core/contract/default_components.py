"""Components that are found under default names: for checkpoints, for `detect_nonfinite=True`, and for `log_with`.

The core asks for each when it is first needed, and imports nothing before that.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from accel_core.contract.tensor_layouts import OptimizerState, SavedOptimizer, State
    from accel_core.loop.run import Asynchronous, Run
    from accel_core.options.handlers import TrackingKwargs
    from accel_core.options.project import ProjectConfiguration
    from accel_core.processes.world import World
    from accel_core.tracking.selection import Chosen

CHECKPOINTS: Final = ("accel.checkpoints", "neutral")
DETECTOR: Final = ("accel.diagnostics", "nonfinite")
RECORDER: Final = ("accel.recorders", "background")
"""Groups of entry points, and the default name in each."""


_Path = str | os.PathLike[str]
_Kwargs = Mapping[str, Any] | None
_Table = tuple[Sequence[str] | None, Sequence[Sequence[Any]] | None, Any]


class CheckpointComponent(Protocol):
    """Made without arguments, once for each Accelerator that needs it. The first three are the hooks of these names."""

    def save_checkpoint(self, run: Run, folder: _Path | None, asynchronous: Asynchronous) -> str:
        """The hook."""

    def load_checkpoint(self, run: Run, folder: _Path | None) -> None:
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
        directory: _Path,
        max_shard_size: int | str,
        safe_serialization: bool,
        world: World,
        prefix: str = "",
    ) -> None:
        """See `Accelerator.save_model`: of a model that is whole, or of what a function presents on each rank. A collective."""

    def save_object(self, obj: Any, f: _Path, safe_serialization: bool, world: World, save_on_each_node: bool) -> None:
        """See `Accelerator.save`. No collective."""

    def load_checkpoint_in_model(self, model: nn.Module, checkpoint: _Path) -> None:
        """Reads weights into a model, all of them or it raises. No collective."""

    def export_weights(self, source: _Path, directory: _Path) -> Any:
        """Writes the weights of a checkpoint, or of other files, as plain safetensors. No collective."""


class Detector(Protocol):
    """Watches the models and backwards of one Accelerator, and raises `NonFiniteError` on every rank."""

    def watch(self, model: nn.Module) -> None:
        """Begins to record the forwards of a model that is trained: the user's, inside a wrapper if there is one."""

    def release(self) -> None:
        """Takes the hooks off the models, and forgets what was recorded."""


DetectorFactory = Callable[..., Detector]
"""Called with the world, the feed, what is prepared, `strategy=`, `relay=` and `owners=` by hook, None for the core."""


class Recorder(Protocol):
    """Records the run of one process, as far as it records, for the Accelerator's methods; `only` names the one tracker that does."""

    @property
    def on_every_rank(self) -> bool:
        """Whether ranks record something of their own."""

    @property
    def in_hand(self) -> list[Any]:
        """See `Accelerator.trackers`."""

    def init(self, project_name: object, config: object, init_kwargs: _Kwargs, *, resume: bool) -> None:
        """See `Accelerator.init_trackers`."""

    def log(self, values: Mapping[str, Any], step: int | None, log_kwargs: _Kwargs, *, only: str | None = None) -> None:
        """See `Accelerator.log`."""

    def log_images(
        self,
        values: Mapping[str, Any],
        step: int | None,
        log_kwargs: _Kwargs,
        dataformats: str | None,
        *,
        only: str | None = None,
    ) -> None:
        """See `Accelerator.log_images`."""

    def log_table(
        self, name: str, content: _Table, step: int | None, log_kwargs: _Kwargs, *, only: str | None = None
    ) -> None:
        """See `Accelerator.log_table`; `content` is columns, data and dataframe."""

    def get(self, name: str, unwrap: bool = False) -> Any:
        """See `Accelerator.get_tracker`."""

    def caught_up(self, name: str) -> Any:
        """The tracker itself, when it has recorded what was logged so far; what takes every call where it does not record."""

    def state(self) -> Any:
        """The data of the recorded run for a checkpoint, as JSON."""

    def resume(self, state: Any) -> None:
        """Goes on with the run of a checkpoint, if `state` names one."""

    def finish(self, failed: bool | None = None) -> None:
        """See `Accelerator.end_training`."""

    def details(self) -> dict[str, str]:
        """The status of each tracker, by name, for `explain()`."""


RecorderFactory = Callable[["Chosen", "TrackingKwargs", "World", "ProjectConfiguration"], Recorder]
"""Makes a recorder for these trackers: the second says how failures are treated, the last where local trackers write."""
