"""Option classes for `Accelerator(kwargs_handlers=[...])`, and the folders of a project."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar, Literal

REGIONAL = "use_regional_compilation"
Location = str | os.PathLike[str] | None


@dataclass
class KwargsHandler:
    """Base of the option classes. A field that was not set has the receiver's own default."""

    on_request: ClassVar[bool] = False  # whether options wait for a call of the user's, and are never idle

    def to_kwargs(self) -> dict[str, Any]:
        """The options that differ from the defaults of the class."""
        values = {field: getattr(self, field.name) for field in fields(self)}
        return {field.name: value for field, value in values.items() if value != _default_of(field)}


def _default_of(field: Any) -> Any:
    return field.default_factory() if callable(field.default_factory) else field.default


def check_flags(options: object, *names: str) -> None:
    """Raises `TypeError` for a flag that is no bool: a text such as "no" would count as true."""
    for name in names:
        value = getattr(options, name)
        if not isinstance(value, bool):
            asked = f"{type(options).__name__}({name}={value!r})"
            raise TypeError(f"{asked} is a {type(value).__name__}: give True or False.")


@dataclass
class InitProcessGroupKwargs(KwargsHandler):
    """Options of the communication between processes.

    Args:
        backend: library that carries messages, such as nccl; None: gloo, and the accelerator's own.
        init_method: address (URL) at which the processes meet; None: the one of the launcher.
        timeout: longest wait for other processes, in every group; None: torch's default.
    """

    backend: str | None = None
    init_method: str | None = None
    timeout: timedelta | None = None


@dataclass
class AutocastKwargs(KwargsHandler):
    """Options of `Accelerator.autocast`.

    Args:
        enabled: False runs the block in full precision.
        cache_enabled: whether casts of weights are kept until the block ends; None: as torch does.
    """

    enabled: bool = True
    cache_enabled: bool | None = None


@dataclass
class GradientAccumulationPlugin(KwargsHandler):
    """Options of gradient accumulation, beyond `gradient_accumulation_steps`.

    Args:
        num_steps: number of micro-batches in a window, which is one step of the optimizer.
        adjust_scheduler: advance a scheduler once per micro-batch of a window, instead of once in all.
        sync_with_dataloader: change the weights at the end of a loader too, after fewer micro-batches.
        sync_each_batch: exchange gradients after each micro-batch: less memory, more traffic.
        mean_over: divide gradients by how many micro-batches came ("window") or are usual ("steps").
    """

    num_steps: int = 1
    adjust_scheduler: bool | None = None
    sync_with_dataloader: bool = True
    sync_each_batch: bool = False
    mean_over: Literal["window", "steps"] = "window"

    def __post_init__(self) -> None:
        if self.mean_over not in ("window", "steps"):
            raise ValueError(f"GradientAccumulationPlugin(mean_over={self.mean_over!r}): expected 'window' or 'steps'.")
        if type(self.num_steps) is not int or self.num_steps < 1:
            given = f"GradientAccumulationPlugin(num_steps={self.num_steps!r})"
            raise ValueError(f"{given}: expected an integer of at least 1.")


@dataclass
class TrackingKwargs(KwargsHandler):
    """Options for trackers: one that fails is switched off with a warning, and training goes on.

    Args:
        strict: stop with a `TrackerError` if a tracker fails or cannot record a value.
        start_timeout: seconds that a tracker may take to start; the first record waits for it.
        stall_timeout: seconds of a slow record that `save_state` and `get_tracker` wait for, at most.
        finish_timeout: seconds to wait for records when the training, or the program, ends.
        most_pending: number of records that may wait for a tracker; a large one counts as several.
    """

    strict: bool = False
    start_timeout: float = 120.0
    stall_timeout: float = 60.0
    finish_timeout: float = 300.0
    most_pending: int = 100_000

    def __post_init__(self) -> None:
        for name in ("start_timeout", "stall_timeout", "finish_timeout", "most_pending"):
            if not getattr(self, name) > 0:
                raise ValueError(f"TrackingKwargs({name}={getattr(self, name)!r}): expected a positive number.")


@dataclass
class TorchDynamoPlugin(KwargsHandler):
    """Options of the compiler for models, which is `torch.compile`.

    All but the last field are handed to it, and it refuses `mode` beside `options`.

    Args:
        backend: a name in either case, or a function as `torch.compile` takes. "no": nothing is.
        mode: preset of the compiler "inductor", such as "max-autotune".
        fullgraph: stop with an error if a model cannot be compiled as a whole.
        dynamic: compile once for all sizes. False: anew for each. None: for all once one changes.
        options: settings of the compiler, by name; refused beside `mode`.
        disable: compile nothing, for a comparison.
        use_regional_compilation: compile repeated blocks of a model only, equal ones once.
    """

    backend: str | Callable[..., Any] = "inductor"
    mode: str | None = None
    fullgraph: bool = False
    dynamic: bool | None = None
    options: Mapping[str, Any] | None = None
    disable: bool = False
    use_regional_compilation: bool = False

    def __post_init__(self) -> None:
        check_flags(self, "fullgraph", "disable", REGIONAL, *([] if self.dynamic is None else ["dynamic"]))


@dataclass
class ProjectConfiguration:
    """Folders of a project, and how its checkpoints are named and kept.

    Args:
        project_dir: the folder of the project; None: what `Accelerator(project_dir=...)` says.
        logging_dir: where trackers that write files put them; None: `project_dir`.
        automatic_checkpoint_naming: they are in `project_dir/checkpoints/checkpoint_<iteration>`.
        total_limit: how many of those are kept, at least 1; None: all. Takes automatic names.
        iteration: the number of the next checkpoint, from 0.
        save_on_each_node: whether files are written on every machine, instead of once.
    """

    project_dir: Location = None
    logging_dir: Location = None
    automatic_checkpoint_naming: bool = False
    total_limit: int | None = None
    iteration: int = 0
    save_on_each_node: bool = False

    def __post_init__(self) -> None:
        check_flags(self, "automatic_checkpoint_naming", "save_on_each_node")
        if type(self.iteration) is not int or self.iteration < 0:
            raise ValueError(f"ProjectConfiguration(iteration={self.iteration!r}): expected an integer of at least 0.")
        given = f"ProjectConfiguration(total_limit={self.total_limit!r})"
        if self.total_limit is not None and (type(self.total_limit) is not int or self.total_limit < 1):
            raise ValueError(f"{given}: expected an integer of at least 1.")
        if self.total_limit is not None and not self.automatic_checkpoint_naming:
            what = f"{given} limits checkpoints with automatic names: folders that you name yourself are never deleted."
            raise ValueError(f"{what} Add automatic_checkpoint_naming=True, or leave total_limit out.")
        self._logs_were_given = self.logging_dir is not None
        self.set_directories(self.project_dir)

    def set_directories(self, project_dir: Location = None) -> None:
        """Sets the project's folder, made at the first write, and that of logs if not given."""
        follows = not self._logs_were_given and self.logging_dir in (None, self.project_dir)
        self.project_dir = project_dir
        if follows:
            self.logging_dir = project_dir


def resolve_project(
    project_dir: Any, project_config: ProjectConfiguration | None, source: str = "argument"
) -> ProjectConfiguration:
    """A copy of the configuration, with its folder; `ValueError` for two, or names without one."""
    if project_config is None:
        return ProjectConfiguration(project_dir)
    # A copy, because `iteration` counts: two Accelerators that were given one configuration do not count for each other.
    project = copy.copy(project_config)
    if project.project_dir is None:
        project.set_directories(project_dir)
    elif project_dir is not None and Path(project.project_dir) != Path(project_dir):
        raise ValueError(
            f"project_dir={os.fspath(project_dir)!r}{'' if source == 'argument' else f' ({source})'} and ProjectConfiguration(project_dir="
            f"{os.fspath(project.project_dir)!r}) were both given, and a run has one folder. Leave one of them out."
        )
    if project.automatic_checkpoint_naming and project.project_dir is None:
        what = "ProjectConfiguration(automatic_checkpoint_naming=True) was given, but no folder."
        raise ValueError(f"{what} Add project_dir=... to it, or to Accelerator(...).")
    return project
