"""Profiling a block of the program with torch's profiler, each rank for itself."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from torch.profiler import ProfilerActivity

from accel_core.options.handlers import KwargsHandler

if TYPE_CHECKING:
    from accel_core.processes.world import World


@dataclass
class ProfileKwargs(KwargsHandler):
    """Options of `Accelerator.profile`; all but `output_trace_dir` are `torch.profiler.profile`'s.

    `activities`: names such as "cpu" too; None: the CPU, and the accelerator if there is one.
    `schedule_option`: arguments of `torch.profiler.schedule`; None: everything is recorded.
    `on_trace_ready` is called behind each cycle, `output_trace_dir` gets a Chrome trace of each.
    """

    on_request: ClassVar[bool] = True

    activities: Sequence[str | ProfilerActivity] | None = None
    schedule_option: Mapping[str, int] | None = None
    on_trace_ready: Callable[[torch.profiler.profile], Any] | None = None
    record_shapes: bool = False
    profile_memory: bool = False
    with_stack: bool = False
    with_flops: bool = False
    with_modules: bool = False
    output_trace_dir: str | os.PathLike[str] | None = None

    def build(self) -> torch.profiler.profile:
        """A new profiler, which writes no files; `ValueError` for an activity it cannot record."""
        given = self.to_kwargs()
        given.pop("output_trace_dir", None)
        if self.activities is not None:
            given["activities"] = list(dict.fromkeys(map(_activity, self.activities)))
        if (schedule := given.pop("schedule_option", None)) is not None:
            given["schedule"] = torch.profiler.schedule(**schedule)
        return torch.profiler.profile(**given)


@contextmanager
def profile(handler: ProfileKwargs, world: World) -> Iterator[torch.profiler.profile]:
    """Profiles the block on this rank; cycles: `profile_<rank>.json`, `profile_<rank>_1.json` …"""
    folder = None if handler.output_trace_dir is None else Path(handler.output_trace_dir)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    recorded = 0

    def ready(profiler: torch.profiler.profile) -> None:
        nonlocal recorded
        recorded += 1
        if handler.on_trace_ready is not None:
            handler.on_trace_ready(profiler)
        if folder is not None:
            names = (f"profile_{world.rank}{f'_{number}' if number else ''}.json" for number in count())
            profiler.export_chrome_trace(str(next(path for path in map(folder.joinpath, names) if not path.exists())))

    profiler = handler.build()
    profiler.on_trace_ready = ready
    with profiler:
        yield profiler
    if not recorded:
        warnings.warn(
            f"ProfileKwargs(schedule_option={handler.schedule_option!r}) was asked for, but nothing was recorded: "
            f"step() of the profiler was called {profiler.step_num} times. Call it in every step.",
            stacklevel=3,  # the `with` statement, below contextlib
        )


def _activity(given: str | ProfilerActivity) -> ProfilerActivity:
    known = {name.lower(): activity for name, activity in ProfilerActivity.__members__.items()}
    activity = known.get(given.lower()) if isinstance(given, str) else given
    possible = torch.profiler.supported_activities()
    if activity not in possible:  # torch would leave some of them out in silence
        what = f"ProfileKwargs(activities=...) holds {given!r}, which torch cannot record here, only"
        raise ValueError(f"{what} {', '.join(sorted(each.name.lower() for each in possible))}. Leave activities out.")
    return cast("ProfilerActivity", activity)
