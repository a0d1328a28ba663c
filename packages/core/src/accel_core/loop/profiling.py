"""Profiling a block of the program with torch's profiler, each rank for itself."""

from __future__ import annotations

import inspect
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

import torch
from torch.profiler import ProfilerAction, ProfilerActivity

from accel_core.base.suggestions import nearest
from accel_core.options.handlers import KwargsHandler
from accel_core.options.resolution import as_sequence

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

    Raises:
        TypeError: for a value of another type.
        ValueError: for an activity or a key of the schedule that torch does not know, and for a
            schedule that could not be followed.
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

    def __post_init__(self) -> None:
        _activities(self.activities)
        if self.schedule_option is not None:
            _check_schedule(self.schedule_option)
        if self.on_trace_ready is not None and not callable(self.on_trace_ready):
            raise TypeError(
                f"ProfileKwargs(on_trace_ready={self.on_trace_ready!r}) is a {type(self.on_trace_ready).__name__}: give a "
                f"function that takes the profiler."
            )

    def build(self) -> torch.profiler.profile:
        """A new profiler with these options, which writes no files by itself.

        Raises:
            ValueError: if torch cannot record one of the activities here.
        """
        activities = _activities(self.activities)
        here = torch.profiler.supported_activities()
        missing = [activity.name for activity in activities or () if activity not in here]
        if missing:
            raise ValueError(
                f"ProfileKwargs(activities={self.activities!r}) was asked for, but torch cannot record {', '.join(missing)} "
                f"here, only {_names(here)}. Leave activities out to record what there is."
            )
        schedule = self.schedule_option
        return _Profiler(
            activities=activities,
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


def _activities(given: object) -> list[ProfilerActivity] | None:
    if given is None:
        return None
    known = ProfilerActivity.__members__
    by_name = {name.lower(): activity for name, activity in known.items()}
    found = []
    for item in as_sequence("activities", given):
        activity = by_name.get(item.lower()) if isinstance(item, str) else item
        if not isinstance(activity, ProfilerActivity):
            meant = nearest(str(item), list(by_name))
            hint = "" if meant is None else f" Type {meant!r} if that was meant."
            raise ValueError(
                f"ProfileKwargs(activities={given!r}) holds {item!r}, which torch cannot record. Known: "
                f"{', '.join(by_name)}.{hint}"
            )
        found.append(activity)
    if not found:
        raise ValueError(
            "ProfileKwargs(activities=[]) would record nothing. Leave activities out to record the CPU and the "
            "accelerator, or name one."
        )
    return list(dict.fromkeys(found))  # torch refuses one that is named twice


def _names(activities: set[ProfilerActivity]) -> str:
    return ", ".join(sorted(activity.name for activity in activities))


def _check_schedule(given: Mapping[str, int]) -> None:
    """Raises what torch would raise at the start of the profiled block, and names what was meant."""
    parameters = inspect.signature(torch.profiler.schedule).parameters
    for name in given:
        if name not in parameters:
            meant = nearest(name, list(parameters))
            hint = "" if meant is None else f" Type {meant!r} if that was meant."
            _refuse(
                given, f"{name!r} is not an argument of torch.profiler.schedule. Known: {', '.join(parameters)}.{hint}"
            )
    missing = [
        name for name, parameter in parameters.items() if parameter.default is parameter.empty and name not in given
    ]
    if missing:
        _refuse(given, f"{', '.join(missing)} is missing. Give wait, warmup and active, in steps.")
    for name, value in given.items():
        least = 1 if name == "active" else 0
        if type(value) is not int or value < least:
            _refuse(given, f"{name}={value!r} is no number of steps. Give an integer of at least {least}.")


def _refuse(given: Mapping[str, int], problem: str) -> NoReturn:
    raise ValueError(f"ProfileKwargs(schedule_option={given!r}): {problem}")
