"""The arguments of `init_trackers`, and the run made of them: id, folder, and `TrackedRun`s."""

from __future__ import annotations

import copy
import hashlib
import logging
import re
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel_core import TrackedRun

if TYPE_CHECKING:
    from accel_core import ProjectConfiguration, World

RUNS = "runs"
"""The folder of local trackers where neither `logging_dir` nor `project_dir` was given."""

NO_OPTIONS: Mapping[str, Any] = {}

_LONGEST = 100  # bytes of a project's name in that of its folder, where 255 is the most of file systems

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Plan:
    """The arguments of `init_trackers`.

    Args:
        project: its name.
        config: plain data.
        options: of trackers, by their names.
        resume: whether the run of a checkpoint goes on.
    """

    project: str
    config: Mapping[str, Any]
    options: Mapping[str, Mapping[str, Any]]
    resume: bool

    def run(
        self, name: str, run_id: str, step: int, directory: Path | None, resumed: Mapping[str, Any] | None
    ) -> TrackedRun:
        """The run for the tracker of a name, with a config and options of its own."""
        return TrackedRun(
            project=self.project,
            run_id=run_id,
            config=copy.deepcopy(self.config),
            directory=directory,
            options=self.options.get(name, NO_OPTIONS),
            resumed=resumed,
            step=step,
        )

    def folder(self, project: ProjectConfiguration, run_id: str) -> Path:
        """The folder of a run for local trackers, which is logged where nobody chose it."""
        given = project.logging_dir or project.project_dir
        folder = Path(given or RUNS) / _file_name(self.project)
        if given is None:
            logger.warning("Runs are recorded in %s, because neither logging_dir nor project_dir was given.", folder)
        return folder / run_id


def new_id(world: World) -> str:
    """That of a new run, different also from those of the same second: without the program's random streams."""
    of_rank = "" if world.is_main else f"_rank{world.rank}"
    return f"{time.strftime('%Y-%m-%d_%H-%M-%S')}_{secrets.token_hex(4)}{of_rank}"


def _file_name(project: str) -> str:
    name = re.sub(r"[^\w. -]", "_", project).strip(". ") or "_"
    if len(name.encode()) <= _LONGEST:
        return name
    start = name.encode()[:_LONGEST].decode(errors="ignore").rstrip(". ")
    return f"{start}_{hashlib.sha256(project.encode()).hexdigest()[:8]}"
