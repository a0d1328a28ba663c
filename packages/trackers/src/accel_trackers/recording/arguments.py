"""The arguments of calls: checked, and the run that `init_trackers` asks for."""

from __future__ import annotations

import hashlib
import logging
import operator
import re
import secrets
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from accel_core.api.component import nearest

if TYPE_CHECKING:
    from accel_core import ProjectConfiguration, World

_RUNS = "runs"  # the folder of local trackers where neither `logging_dir` nor `project_dir` was given
_LONGEST = 100  # bytes of a project's name in that of its folder, where 255 is the most of file systems

logger = logging.getLogger(__name__)


class Plan(NamedTuple):
    """The arguments of `init_trackers`: `config` as plain data, `options` by trackers' names."""

    project: str
    config: Mapping[str, Any]
    options: Mapping[str, Mapping[str, Any]]
    resume: bool

    def folder(self, project: ProjectConfiguration, run_id: str) -> Path:
        """The folder of a run for local trackers, which is logged where nobody chose it."""
        name = re.sub(r"[^\w. -]", "_", self.project).strip(". ") or "_"
        if len(name.encode()) > _LONGEST:
            start = name.encode()[:_LONGEST].decode(errors="ignore").rstrip(". ")
            name = f"{start}_{hashlib.sha256(self.project.encode()).hexdigest()[:8]}"
        given = project.logging_dir or project.project_dir
        folder = Path(given or _RUNS) / name
        if given is None:
            logger.warning("Runs are recorded in %s, because neither logging_dir nor project_dir was given.", folder)
        return folder / run_id


def new_id(world: World) -> str:
    """The id of a new run, unique also within a second; uses no random stream of the program."""
    of_rank = "" if world.is_main else f"_rank{world.rank}"
    return f"{time.strftime('%Y-%m-%d_%H-%M-%S')}_{secrets.token_hex(4)}{of_rank}"


def as_step(asked: str, step: Any) -> int | None:
    """The step that a call was given. Raises TypeError or ValueError if services cannot hold it."""
    if step is None:
        return None
    number = operator.index(step)  # a 0-d tensor of integers has it too
    if not 0 <= number < 2**63:
        raise ValueError(f"{asked} was given step={number}: expected an integer from 0 to 2**63 - 1, or None.")
    return number


def check_mapping(asked: str, value: object) -> None:
    """Raises TypeError for what is no mapping with names as keys."""
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        raise TypeError(f"{asked} was given {type(value).__name__} {value!r:.100}: expected a dict with names as keys.")


def unknown_tracker(asked: str, name: object, names: Collection[str], those: str) -> str:
    """The message about a name that is none of `names`."""
    near = nearest(str(name), [*names])
    return f"{asked} names no tracker. " + (
        f"Type {near!r} if that was meant." if near else f"{those}: {', '.join(names) or 'none'}."
    )
