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
from torch.profiler import ProfilerAction, ProfilerActivity

from accel_core.options.handlers import KwargsHandler

if TYPE_CHECKING:
    from accel_core.processes.world import World


@dataclass
class ProfileKwargs(KwargsHandler):
    """Options of `Accelerator.profile`. All but `output_trace_dir` are those of `torch.profiler.profile`.

    Args:
        activities: what is recorded: names of `torch.profiler.ProfilerActivity` in either case,
            such as "cpu", or its members. None: the CPU, and the accelerator if there is one.
        schedule_option: arguments of `torch.profiler.schedule`, in steps:
            `dict(wait=1, warmup=1, active=3, repeat=2)` leaves out a step, warms up for one,
            records three, and does so twice (`repeat=0`: to the end), after the first `skip_first`
            steps. A step ends where the block calls `step()` of the profiler. None: everything.
        on_trace_ready: called with the profiler at the end of each recorded cycle; without a
            schedule at the end of the block.
        record_shapes: whether the shapes of the inputs of operators are recorded.
        profile_memory: whether allocations are recorded.
        with_stack: whether source lines are recorded.
        with_flops: whether floating-point operations are estimated, for products of matrices and 2d
            convolutions.
        with_modules: whether the hierarchy of modules is recorded; torch does so for TorchScript
            only.
        output_trace_dir: the folder for a Chrome trace of each recorded cycle, see `profile`. None:
            no files.

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
        """A new profiler with these options, which writes no files by itself. Raises what torch raises for them.

        Raises:
            ValueError: for an activity that torch does not know, or cannot record here.
        """
        schedule = self.schedule_option
        return _Profiler(
            activities=None if self.activities is None else list(dict.fromkeys(map(_activity, self.activities))),
            schedule=None if schedule is None else torch.profiler.schedule(**schedule),
            on_trace_ready=self.on_trace_ready,
            record_shapes=self.record_shapes,
            profile_memory=self.profile_memory,
            with_stack=self.with_stack,
            with_flops=self.with_flops,
            with_modules=self.with_modules,
        )


@contextmanager
def profile(handler: ProfileKwargs, world: World) -> Iterator[torch.profiler.profile]:
    """Profiles the block on this rank: `with profile(handler, world) as profiler:`.

    With `output_trace_dir`, each recorded cycle becomes a file there: `profile_<rank>.json`, or,
    where that exists, `profile_<rank>_1.json` and so on. Nothing is overwritten: neither by later
    cycles nor by later blocks or runs. What was recorded until an error is written too.

    No collective: any rank may profile alone, and files of other ranks may not be complete yet when
    the block is left (`wait_for_everyone()` sees to that).

    Args:
        handler: the options.
        world: says which rank this is.

    Raises:
        RuntimeError: a trace cannot be written, for instance because `on_trace_ready` has exported
            it: torch does so once.
        ValueError: if `output_trace_dir` is a file.
    """
    traces = _Traces(handler, world.rank)
    profiler = handler.build()
    profiler.on_trace_ready = traces
    profiler.__enter__()
    try:
        yield profiler
    except BaseException as error:
        _leave_after(error, profiler)
        raise
    profiler.__exit__(None, None, None)
    if traces.ready == 0:
        warnings.warn(
            f"ProfileKwargs(schedule_option={handler.schedule_option!r}) was asked for, but nothing was recorded: "
            f"step() of the profiler was called {profiler.step_num} times. Call it at the end of every step of the loop.",
            stacklevel=3,  # the `with` statement, below contextlib
        )


class _Profiler(torch.profiler.profile):
    def step(self) -> None:
        """Ends a step. After an error in `on_trace_ready` nothing is recorded until the next cycle.

        torch takes the recording that its schedule wants next for granted then, and stopping it
        crashes the process.
        """
        try:
            super().step()
        except BaseException:
            self.current_action = ProfilerAction.NONE
            raise


class _Traces:
    """Called at the end of each recorded cycle: by the user's function first, and then written."""

    def __init__(self, handler: ProfileKwargs, rank: int) -> None:
        self._handler = handler
        self._rank = rank
        self.ready = 0
        self._folder = None if handler.output_trace_dir is None else Path(handler.output_trace_dir)
        if self._folder is not None:
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
            except (FileExistsError, NotADirectoryError) as error:
                raise ValueError(
                    f"ProfileKwargs(output_trace_dir={str(self._folder)!r}) was asked for, but {error.filename} is a file. "
                    f"Give the name of a folder; it is made if it does not exist."
                ) from error

    def __call__(self, profiler: torch.profiler.profile) -> None:
        self.ready += 1
        if self._handler.on_trace_ready is not None:
            self._handler.on_trace_ready(profiler)
        if self._folder is not None:
            self._write(profiler, _new_file(self._folder, f"profile_{self._rank}"))

    def _write(self, profiler: torch.profiler.profile, path: Path) -> None:
        try:
            profiler.export_chrome_trace(str(path))
        except BaseException as error:
            path.unlink()
            if not isinstance(error, RuntimeError):
                raise
            raise RuntimeError(
                f"The trace was to be written to {path}, and torch says: {error} It writes each trace once: if on_trace_ready "
                f"exports it, leave output_trace_dir out of ProfileKwargs."
            ) from error


def _new_file(folder: Path, stem: str) -> Path:
    for number in count():
        path = folder / (f"{stem}_{number}.json" if number else f"{stem}.json")
        try:
            path.touch(exist_ok=False)
        except FileExistsError:
            continue
        return path
    raise AssertionError("numbers do not end")


def _leave_after(error: BaseException, profiler: torch.profiler.profile) -> None:
    """Stops the profiler after an error in the block, which no second error may hide."""
    try:
        profiler.__exit__(type(error), error, error.__traceback__)
    except Exception as second:  # noqa: BLE001  (shown)
        warnings.warn(
            f"An error ended the profiled block, and its trace was lost to another one: {type(second).__name__}: {second}",
            stacklevel=4,  # the `with` statement, below contextlib
        )


def _activity(given: str | ProfilerActivity) -> ProfilerActivity:
    known = {name.lower(): activity for name, activity in ProfilerActivity.__members__.items()}
    activity = known.get(given.lower()) if isinstance(given, str) else given
    if activity not in torch.profiler.supported_activities():  # torch would leave some of them out in silence
        here = ", ".join(sorted(each.name.lower() for each in torch.profiler.supported_activities()))
        raise ValueError(
            f"ProfileKwargs(activities=...) holds {given!r}, which torch cannot record here, only {here}. Leave activities out to "
            f"record what there is."
        )
    return cast("ProfilerActivity", activity)
