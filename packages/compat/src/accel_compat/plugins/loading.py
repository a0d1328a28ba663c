"""Options of data loading, and folders of a project."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass

import accel_core
import accel_data

Location = str | os.PathLike[str] | None


@dataclass
class DataLoaderConfiguration:
    """Options of loaders that are prepared."""

    split_batches: bool = False
    dispatch_batches: bool | None = None
    even_batches: bool = True
    use_seedable_sampler: bool = False
    data_seed: int | None = None
    non_blocking: bool = False
    use_stateful_dataloader: bool = False

    def ours(self) -> accel_data.DataLoaderConfiguration:
        """Options of our loader."""
        names = DataLoaderConfiguration.__dataclass_fields__
        return accel_data.DataLoaderConfiguration(**{name: getattr(self, name) for name in names})


@dataclass
class ProjectConfiguration:
    """Folders of a project, and how its checkpoints are named and kept."""

    project_dir: Location = None
    logging_dir: Location = None
    automatic_checkpoint_naming: bool = False
    total_limit: int | None = None
    iteration: int = 0
    save_on_each_node: bool = False

    def __post_init__(self) -> None:
        self.set_directories(self.project_dir)

    def set_directories(self, project_dir: Location = None) -> None:
        """Sets the project's folder, and that of logs if there is none."""
        self.project_dir = project_dir
        if self.logging_dir is None:
            self.logging_dir = project_dir

    def ours(self) -> accel_core.ProjectConfiguration:
        """Our options; a limit without automatic names deletes nothing, and is left out."""
        options = {name: asdict(self)[name] for name in ProjectConfiguration.__dataclass_fields__}
        if not self.automatic_checkpoint_naming:
            options["total_limit"] = None
        return accel_core.ProjectConfiguration(**options)
