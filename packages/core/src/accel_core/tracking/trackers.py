"""The trackers of one Accelerator, from `init_trackers` to `end_training`.

**A run begins with its first record**, not with `init_trackers`: by then `load_state` has said which run goes on. `get_tracker`,
`save_state` and `end_training` begin it too.

**Starting** is waited for, so that the random streams of the program can be put back where they were: services draw names from them.
Everything after it is handed over to the tracker's own thread.

**At the end of the program** what is pending is recorded, also without `end_training`.
"""

from __future__ import annotations

import atexit
import copy
import difflib
import logging
import operator
import os
import re
import secrets
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from accel_core.deprecation import level_of_the_user
from accel_core.tracking.blank import Blank
from accel_core.tracking.ending import finish, finish_at_exit, let_go, streams_kept
from accel_core.tracking.images import as_images
from accel_core.tracking.readable import readable
from accel_core.tracking.recorder import Recorder, Values
from accel_core.tracking.rules import TrackerError
from accel_core.tracking.selection import known_names, name_of
from accel_core.tracking.snapshot import Snapshot
from accel_core.tracking.tracker import GeneralTracker, TrackedRun, Tracker
from accel_core.tracking.values import as_table

if TYPE_CHECKING:
    from accel_core.project import ProjectConfiguration
    from accel_core.tracking.rules import TrackingKwargs
    from accel_core.tracking.selection import Chosen
    from accel_core.world import World

RUNS = "runs"
"""The folder of local trackers where neither `logging_dir` nor `project_dir` was given."""

_GOES_ON = "The training goes on; TrackingKwargs(strict=True) would end it."
_NO_OPTIONS: Mapping[str, Any] = {}

T = TypeVar("T")

logger = logging.getLogger(__name__)


class Trackers:
    """Records the run of one process, as far as it records.

    Args:
        chosen: the trackers.
        rules: how failures are treated.
        world: the processes.
        project: where local trackers write.
    """

    def __init__(
        self,
        chosen: Chosen,
        rules: TrackingKwargs,
        world: World,
        project: ProjectConfiguration,
    ) -> None:
        self._chosen = chosen
        self._rules = rules
        self._world = world
        self._project = project
        self._names = chosen.names
        components = [each.component for each in chosen.selected]
        self.on_every_rank = any(not each.main_process_only for each in components)
        self._components = [each for each in components if world.is_main or not each.main_process_only]
        self._plan: _Plan | None = None
        self._recorders: list[Recorder] | None = None
        self._resumed: Mapping[str, Any] = {}
        self._run_id = ""
        self._next_step = 0
        self._ended = False
        self._process = os.getpid()
        self._starting = threading.RLock()  # a signal handler may log, too
        self._at_exit: Callable[[], None] | None = None
        if chosen.left_out and world.is_main:
            logger.warning(
                "log_with='all' records with %s. Left out:\n%s",
                ", ".join(self._names) or "nothing",
                "\n".join(f"  {name}: {why}" for name, why in chosen.left_out.items()),
            )

    @property
    def components(self) -> list[Tracker | GeneralTracker]:
        """The trackers that record in this process."""
        return list(self._components)

    def init(
        self, project_name: object, config: object, init_kwargs: Mapping[str, Any] | None, *, resume: bool
    ) -> None:
        """See `Accelerator.init_trackers`."""
        if not isinstance(project_name, str) or not project_name.strip():
            raise TypeError(f"init_trackers({project_name!r}): expected the name of the project, such as 'my-project'.")
        options = self._options("init_trackers(init_kwargs=...)", init_kwargs)
        if self._recorders is not None or self._ended:
            raise RuntimeError(
                f"init_trackers({project_name!r}) was called, but the run {self._run_id!r} has begun. Call it once, before the first "
                f"log(); a second run has an Accelerator of its own."
            )
        if self._components:
            self._plan = _Plan(project_name, readable(config), options, resume)

    def log(self, values: Mapping[str, Any], step: int | None, log_kwargs: Mapping[str, Any] | None) -> None:
        """See `Accelerator.log`."""
        _check_mapping("log()", values)
        options = self._options("log(log_kwargs=...)", log_kwargs)
        number = _number("log()", step)
        if self._is_recording("log()"):
            taken = self._made(lambda: Values(Snapshot.take(values)))
            if taken is None:
                return
            number = self._at(number)
            for each in self._started():
                each.log(taken, number, options.get(each.name, _NO_OPTIONS))
            self._tell()

    def log_images(
        self, values: Mapping[str, Any], step: int | None, log_kwargs: Mapping[str, Any] | None, dataformats: str | None
    ) -> None:
        """See `Accelerator.log_images`."""
        _check_mapping("log_images()", values)
        options = self._options("log_images(log_kwargs=...)", log_kwargs)
        number = _number("log_images()", step)
        if self._is_recording("log_images()"):
            images = self._made(lambda: as_images(values, dataformats))
            if images is None:
                return
            number = self._at(number, advance=False)
            for each in self._started():
                each.log_images(images, number, options.get(each.name, _NO_OPTIONS))
            self._tell()

    def log_table(
        self,
        name: str,
        content: tuple[Sequence[str] | None, Sequence[Sequence[Any]] | None, Any],
        step: int | None,
        log_kwargs: Mapping[str, Any] | None,
    ) -> None:
        """See `Accelerator.log_table`; `content` is columns, data and dataframe."""
        if not isinstance(name, str):
            raise TypeError(f"log_table() was given the name {name!r}, a {type(name).__name__}: expected a text.")
        options = self._options("log_table(log_kwargs=...)", log_kwargs)
        number = _number("log_table()", step)
        if self._is_recording("log_table()"):
            table = self._made(lambda: as_table(*content))
            if table is None:
                return
            number = self._at(number, advance=False)
            for each in self._started():
                each.log_table(name, table, number, options.get(each.name, _NO_OPTIONS))
            self._tell()

    def get(self, name: str, unwrap: bool) -> Any:
        """See `Accelerator.get_tracker`."""
        if name not in self._names:
            raise ValueError(_unknown_tracker(f"get_tracker({name!r})", name, self._names, "log_with has"))
        if not any(name_of(each) == name for each in self._components) or not self._is_recording("get_tracker()"):
            return Blank(name)
        recorder = next(each for each in self._started() if each.name == name)
        recorder.lane.wait(self._rules.stall_timeout)
        self._tell()
        if recorder.lane.failure is not None:
            return Blank(name)
        return recorder.unwrapped() if unwrap else recorder.tracker

    def state(self) -> dict[str, Any]:
        """What a checkpoint says of the run that is recorded here: its id, its next step, and how each tracker goes on."""
        if self._plan is None or os.getpid() != self._process or (self._ended and self._recorders is None):
            return dict(self._resumed)
        recorders = self._started()
        if not self._ended:
            for each in recorders:
                each.flush()
            for each in recorders:
                each.lane.wait(self._rules.stall_timeout)  # of one that is slow, what it said last
            self._tell()
        before = self._resumed["trackers"] if self._resumed.get("run_id") == self._run_id else {}
        own = {each.name: dict(each.state) for each in recorders if each.was_started}
        return {
            "project": self._plan.project,
            "run_id": self._run_id,
            "step": self._next_step,
            "trackers": {**before, **own},
        }

    def resume(self, state: Mapping[str, Any] | None) -> None:
        """Goes on with the run of a checkpoint, if `state` names one."""
        if not state:
            return
        self._resumed = state
        if self._recorders is None:
            return
        if state["run_id"] == self._run_id:
            self._next_step = state["step"]
        else:
            logger.warning(
                "load_state() restored a checkpoint of the run %r, but the run %r has begun to be recorded, and is gone on with. To go on "
                "with the other, call load_state() before the first log(), get_tracker() or save_state().",
                state["run_id"], self._run_id,
            )  # fmt: skip

    def finish(self) -> None:
        """Records what is pending, and closes the run. Returns within `finish_timeout`."""
        if self._ended or os.getpid() != self._process:
            return
        try:
            recorders = [] if self._plan is None else self._started()
        finally:
            self._ended = True
            if self._at_exit is not None:
                atexit.unregister(self._at_exit)
                self._at_exit = None
            # In a `finally` of the program's there may be an exception on its way.
            finish(self._recorders or (), self._rules.finish_timeout, failed=sys.exc_info()[0] is not None)
        if recorders:
            self._tell()

    def details(self) -> dict[str, str]:
        """What becomes of each tracker, by name, for `explain()`."""
        recording = {each.name: each for each in self._recorders or ()}
        found = {name: f"left out of 'all': {why}" for name, why in self._chosen.left_out.items()}
        for name in self._names:
            recorder = recording.get(name)
            if recorder is None:
                here = any(name_of(each) == name for each in self._components)
                found[name] = "has not begun" if here else "records on the main process"
            elif recorder.lane.failure is not None:
                found[name] = f"switched off: {recorder.lane.failure}"
            else:
                found[name] = f"records the run {self._run_id}"
        return found

    def _is_recording(self, call: str) -> bool:
        """Whether this process records; raises where a run is missing."""
        if not self._components:
            return False
        if self._ended or os.getpid() != self._process:
            when = "after end_training()" if self._ended else "in a process that was forked from the one that records"
            where = "Call end_training() last" if self._ended else "Return what is to be recorded to that one"
            self._warn(f"{call} was called {when}, and is not recorded. {where}.")
            return False
        if self._plan is None:
            raise RuntimeError(
                f"{call} was called before init_trackers(), so {', '.join(self._names)} cannot know what is recorded. Call "
                f"accelerator.init_trackers('my-project') first."
            )
        return True

    def _at(self, step: int | None, *, advance: bool = True) -> int:
        """The step of a record: the one given, else the one after the last. Only values count steps."""
        self._started()  # which may resume, and so know the next one
        with self._starting:
            if step is None:
                step = self._next_step if advance else max(self._next_step - 1, 0)
            if advance:
                self._next_step = max(self._next_step, step + 1)
        return step

    def _goes_on(self) -> bool:
        """Whether a checkpoint was loaded whose run goes on here."""
        plan = self._plan
        return bool(self._resumed) and plan is not None and plan.resume and self._resumed["project"] == plan.project

    def _started(self) -> list[Recorder]:
        """The recorders, all of which have started or are switched off."""
        if self._recorders is None:
            with self._starting:
                self._begin()
        assert self._recorders is not None, "that began it"
        return self._recorders

    def _begin(self) -> None:
        plan = self._plan
        assert plan is not None, "whoever calls this has asked"
        if self._recorders is not None:
            return  # another thread was first
        goes_on = self._goes_on()
        self._run_id = self._resumed["run_id"] if goes_on else _new_id(self._world)
        self._next_step = self._resumed["step"] if goes_on else 0
        before = self._resumed["trackers"] if goes_on else {}
        recorders = [Recorder(each, name_of(each), self._rules) for each in self._components]
        weakref.finalize(self, let_go, recorders).atexit = False
        try:
            with streams_kept(recorders, self._rules):
                for each in recorders:
                    each.start(self._run_of(each, plan, before.get(each.name)))
                self._recorders = recorders  # what another thread logs from now on comes after the start
        finally:
            # After the services' own, so that it runs before them.
            self._at_exit = partial(finish_at_exit, list(map(weakref.ref, recorders)), self._rules, self._process)
            atexit.register(self._at_exit)
        self._tell()

    def _run_of(self, recorder: Recorder, plan: _Plan, resumed: Mapping[str, Any] | None) -> TrackedRun:
        needs_folder = recorder.tracker.requires_logging_directory
        return TrackedRun(
            project=plan.project,
            run_id=self._run_id,
            config=copy.deepcopy(plan.config),  # its own
            directory=self._folder(plan.project) if needs_folder else None,
            options=plan.options.get(recorder.name, _NO_OPTIONS),
            resumed=resumed,
            step=self._next_step,
        )

    def _folder(self, project: str) -> Path:
        given = self._project.logging_dir or self._project.project_dir
        folder = Path(given or RUNS) / (re.sub(r"[^\w. -]", "_", project).strip(". ") or "_")
        if given is None and not self._told_folder:
            self._told_folder = True
            logger.warning("Runs are recorded in %s, because neither logging_dir nor project_dir was given.", folder)
        return folder / self._run_id

    _told_folder = False

    def _options(self, asked: str, given: Mapping[str, Any] | None) -> Mapping[str, Mapping[str, Any]]:
        """Options by the names of trackers, also of those that are not active: scripts are written for several."""
        if not given:
            return _NO_OPTIONS
        _check_mapping(asked, given)
        for name, options in given.items():
            if name not in self._names and name not in (known := known_names(self._chosen)):
                raise ValueError(_unknown_tracker(f"{asked} has {name!r}, which", name, known, "Known are"))
            _check_mapping(f"{asked}[{name!r}]", options)
        return {name: dict(options) for name, options in given.items()}  # as they are now

    def _made(self, make: Callable[[], T]) -> T | None:
        """What is to be recorded; None where the user's values are none that can be, which costs the record and not the run."""
        try:
            return make()
        except (TypeError, ValueError) as error:
            if self._rules.strict:
                raise
            self._warn(f"A record is left out: {str(error).rstrip('.')}. {_GOES_ON}")
            return None

    def _tell(self) -> None:
        """Reports, where the training runs, what happened to trackers."""
        told = [(each.lane.cause, text) for each in self._recorders or () for text in each.lane.untold()]
        if told and self._rules.strict:
            texts = "\n".join(text for _, text in told)
            raise TrackerError(f"{texts}\nTrackingKwargs(strict=True) has the run end with it.") from told[0][0]
        for _, text in told:
            self._warn(f"{text.rstrip('.')}. {_GOES_ON}")

    def _warn(self, text: str) -> None:
        warnings.warn(text, RuntimeWarning, stacklevel=level_of_the_user())


@dataclass(frozen=True)
class _Plan:
    """What `init_trackers` was given."""

    project: str
    config: Mapping[str, Any]
    options: Mapping[str, Mapping[str, Any]]
    resume: bool


def _new_id(world: World) -> str:
    """That of a new run, different also from those of the same second: without the program's random streams."""
    of_rank = "" if world.is_main else f"_rank{world.rank}"
    return f"{time.strftime('%Y-%m-%d_%H-%M-%S')}_{secrets.token_hex(4)}{of_rank}"


def _number(asked: str, step: object) -> int | None:
    if step is None:
        return None
    try:
        number = operator.index(None if isinstance(step, bool) else step)  # type: ignore[arg-type]  # a 0-d tensor of integers has it too
    except TypeError:
        raise TypeError(
            f"{asked} was given step={step!r}, a {type(step).__name__}: expected an integer of at least 0, or None."
        ) from None
    if number < 0:
        raise ValueError(f"{asked} was given step={number}: expected an integer of at least 0, or None.")
    return number


def _check_mapping(asked: str, value: object) -> None:
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        raise TypeError(f"{asked} was given {type(value).__name__} {value!r:.100}: expected a dict with names as keys.")


def _unknown_tracker(asked: str, name: object, names: Collection[str], those: str) -> str:
    near = difflib.get_close_matches(str(name), names, n=1)
    hint = f"Type {near[0]!r} if that was meant." if near else f"{those}: {', '.join(names) or 'none'}."
    return f"{asked} names no tracker. {hint}"
