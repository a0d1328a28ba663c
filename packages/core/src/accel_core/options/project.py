"""Folders for the files of a run: logs, and checkpoints with automatic names."""

from __future__ import annotations

import copy
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accel_core.options.handlers import check_flags

Location = str | os.PathLike[str] | None


@dataclass
class ProjectConfiguration:
    """Folders of a project, and how its checkpoints are named and kept.

    Args:
        project_dir: the folder of the project; None: what `Accelerator(project_dir=...)` says.
        logging_dir: where trackers that write files put them; None: `project_dir`.
        automatic_checkpoint_naming: whether checkpoints are written to
            `project_dir/checkpoints/checkpoint_<iteration>`.
        total_limit: how many of those are kept, at least 1; None: all. Takes automatic names.
        iteration: the number of the next checkpoint, from 0.
        save_on_each_node: whether files are written on every machine, instead of once.

    Raises:
        TypeError: for a flag that is no truth value.
        ValueError: for a limit that is too small, or without automatic names.
    """

    project_dir: Location = None
    logging_dir: Location = None
    automatic_checkpoint_naming: bool = False
    total_limit: int | None = None
    iteration: int = 0
    save_on_each_node: bool = False

    def __post_init__(self) -> None:
        check_flags(self, "automatic_checkpoint_naming", "save_on_each_node")
        given = f"ProjectConfiguration(total_limit={self.total_limit!r})"
        if self.total_limit is not None and (type(self.total_limit) is not int or self.total_limit < 1):
            raise ValueError(f"{given}: expected an integer of at least 1.")
        if self.total_limit is not None and not self.automatic_checkpoint_naming:
            raise ValueError(
                f"{given} limits checkpoints with automatic names: folders that you name yourself are never deleted. Add "
                f"automatic_checkpoint_naming=True, or leave total_limit out."
            )
        self._logs_were_given = self.logging_dir is not None
        self.set_directories(self.project_dir)

    def set_directories(self, project_dir: Location = None) -> None:
        """Sets the folder of the project, which is made when something is written, and that of the logs if none was given."""
        follows = not self._logs_were_given and self.logging_dir in (None, self.project_dir)
        self.project_dir = project_dir
        if follows:
            self.logging_dir = project_dir


def resolve_project(
    project_dir: Any, project_config: ProjectConfiguration | None, source: str = "argument"
) -> ProjectConfiguration:
    """The configuration that `Accelerator(project_dir=..., project_config=...)` asks for, as a copy of its own.

    Raises `ValueError` if they name two folders (`source` says who the first), or names have none.
    """
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
        raise ValueError(
            "ProjectConfiguration(automatic_checkpoint_naming=True) was given, but no folder. Add project_dir=... to it, or "
            "to Accelerator(...)."
        )
    return project
