"""Components under default names: for checkpoints, `detect_nonfinite=True`, `log_with` and device maps."""
# ruff: noqa: D102  (the docstrings of the classes describe their methods)

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from accel_core.contract.tensor_layouts import OptimizerState, SavedOptimizer, State
    from accel_core.loop.run import Asynchronous, Run
    from accel_core.options.component_options import Sections
    from accel_core.options.handlers import ProjectConfiguration, TrackingKwargs
    from accel_core.options.resolution import Option
    from accel_core.plugins.offers import Offer, Selected
    from accel_core.processes.world import World

CHECKPOINTS: Final = ("accel.checkpoints", "neutral")
DETECTOR: Final = ("accel.diagnostics", "nonfinite")
RECORDER: Final = ("accel.recorders", "background")
PLACEMENT: Final = ("accel.placements", "device_map")  # `load_checkpoint_in_model` for a model in several places
"""Groups of entry points, and the default name in each."""

_Path = str | os.PathLike[str]
_Kwargs = Mapping[str, Any] | None
_Names = Mapping[int, str]
_Step = int | None
_Text = str | None
_Values = Mapping[str, Any]
_Table = tuple[Sequence[str] | None, Sequence[Sequence[Any]] | None, Any]


class CheckpointComponent(Protocol):
    """Made without arguments, once for each Accelerator that needs it.

    The first three methods are the hooks of these names. The next four serve strategies that
    replicate parameters: entries of a model, state of an optimizer, the reasons why one cannot be
    given what was saved, and giving it. The others are `get_state_dict` and `save_model`, which are
    collectives, `save`, and reading and writing of weights as plain files.
    """

    def save_checkpoint(self, run: Run, folder: _Path | None, asynchronous: Asynchronous) -> str: ...
    def load_checkpoint(self, run: Run, folder: _Path | None, missing_ok: bool) -> bool: ...
    def wait_for_checkpoint(self, run: Run) -> None: ...

    def capture_model(self, model: nn.Module) -> State: ...
    def capture_optimizer(self, optimizer: Optimizer, names: _Names) -> OptimizerState: ...
    def optimizer_problems(self, optimizer: Optimizer, names: _Names, saved: SavedOptimizer) -> list[str]: ...
    def restore_optimizer(self, optimizer: Optimizer, names: _Names, saved: SavedOptimizer) -> None: ...

    def gather_state_dict(self, present: Callable[[], State], world: World, prefix: str) -> dict[str, Any]: ...
    def save_weights(
        self,
        weights: nn.Module | Callable[[], State],
        directory: _Path,
        max_shard_size: int | str,
        safe_serialization: bool,
        world: World,
        prefix: str = "",
    ) -> None: ...
    def save_object(
        self, obj: Any, f: _Path, safe_serialization: bool, world: World, save_on_each_node: bool
    ) -> None: ...
    def load_checkpoint_in_model(self, model: nn.Module, checkpoint: _Path) -> None: ...
    def export_weights(self, source: _Path, directory: _Path) -> Any: ...


class Detector(Protocol):
    """Watches an Accelerator's models and backwards; raises `NonFiniteError` on every rank.

    `watch` begins to record the forwards of a model that is trained: the user's, inside a wrapper
    if there is one. `release` takes the hooks off the models, and forgets what was recorded.
    """

    def watch(self, model: nn.Module) -> None: ...
    def release(self) -> None: ...


DetectorFactory = Callable[..., Detector]
"""Called with the world, the feed, what is prepared, `strategy=`, `relay=` and `owners=` by hook, None for the core."""


class Recorder(Protocol):
    """Records the run of one process, for the Accelerator's methods; `only` names one tracker.

    `on_every_rank`: whether ranks record something of their own. `in_hand`: `trackers`.
    `caught_up` gives the tracker itself, when all is recorded, or a null object. `state` is the run
    as JSON, with which `resume` goes on. `details` gives the status of each tracker by name.
    """

    @property
    def on_every_rank(self) -> bool: ...
    @property
    def in_hand(self) -> list[Any]: ...
    def init(self, project_name: object, config: object, init_kwargs: _Kwargs, *, resume: bool) -> None: ...
    def log(self, values: _Values, step: _Step, log_kwargs: _Kwargs, *, only: _Text = None) -> None: ...
    def log_images(
        self, values: _Values, step: _Step, log_kwargs: _Kwargs, dataformats: _Text, *, only: _Text = None
    ) -> None: ...
    def log_table(
        self, name: str, content: _Table, step: _Step, log_kwargs: _Kwargs, *, only: _Text = None
    ) -> None: ...
    def get(self, name: str, unwrap: bool = False) -> Any: ...
    def caught_up(self, name: str) -> Any: ...
    def state(self) -> Any: ...
    def resume(self, state: Any) -> None: ...
    def finish(self, failed: bool | None = None) -> None: ...
    def details(self) -> dict[str, str]: ...


class Chosen(Protocol):
    """The trackers of a run, in order, and by name those that `"all"` leaves out, with the reason."""

    selected: list[Selected]
    left_out: dict[str, str]

    @property
    def names(self) -> list[str]: ...


class RecorderFactory(Protocol):
    """Chooses trackers by `log_with`, importing no service, and makes a recorder for them.

    `rules` say how failures are treated; the project says where local trackers write.
    """

    def choose(self, option: Option[Any], offers: Sequence[Offer], sections: Sections) -> Chosen: ...
    def __call__(self, chosen: Any, rules: TrackingKwargs, world: World, project: ProjectConfiguration) -> Recorder: ...
