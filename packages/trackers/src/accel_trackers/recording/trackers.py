"""The trackers of one Accelerator, from `init_trackers` to `end_training`.

**A run begins with its first record**, not with `init_trackers`: by then `load_state` has said
which run goes on. `get_tracker`, `save_state` and `end_training` begin it too.

**Starting** is waited for, so that the random streams of the program can be put back where they
were: services draw names from them. Everything after it is handed over to the tracker's own thread.

**At the end of the program** what is pending is recorded, also without `end_training`.
"""

from __future__ import annotations

import atexit
import copy
import logging
import operator
import os
import re
import secrets
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Collection, Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from accel_core import GeneralTracker, Table, TrackedRun, Tracker, TrackerError, TrackerHandle
from accel_core.api.component import capture_random_state, nearest, restore_random_state
from accel_core.api.tracker import level_of_the_user
from accel_trackers.recording.images import as_images
from accel_trackers.recording.null_tracker import Blank
from accel_trackers.recording.record import Record, weight
from accel_trackers.recording.recorder import Recorder
from accel_trackers.recording.selection import Chosen, choose, known_names, name_of
from accel_trackers.recording.shutdown import finish, finish_at_exit, is_failing, left, let_go
from accel_trackers.recording.tables import as_table
from accel_trackers.recording.values import clean, readable_config, said

if TYPE_CHECKING:
    from accel_core import ProjectConfiguration, TrackingKwargs, World

_RUNS = "runs"  # the folder of local trackers where neither `logging_dir` nor `project_dir` was given
_GOES_ON = "The training goes on; TrackingKwargs(strict=True) would end it."

_Values = Mapping[str, Any]
_Kwargs = _Values | None
_Step = int | None
_Text = str | None
_Content = Record | Table | Mapping[str, list[torch.Tensor]]

logger = logging.getLogger(__name__)


class Plan(NamedTuple):
    """The arguments of `init_trackers`: `config` as plain data, `options` by trackers' names."""

    project: str
    config: Mapping[str, Any]
    options: Mapping[str, Mapping[str, Any]]
    resume: bool

    def folder(self, project: ProjectConfiguration, run_id: str) -> Path:
        """The folder of a run for local trackers, which is logged where nobody chose it."""
        given = project.logging_dir or project.project_dir
        folder = Path(given or _RUNS) / (re.sub(r"[^\w. -]", "_", self.project).strip(". ") or "_")
        if given is None:
            logger.warning("Runs are recorded in %s, because neither logging_dir nor project_dir was given.", folder)
        return folder / run_id


class Trackers:
    """Records the run of one process, as far as it records."""

    choose = staticmethod(choose)

    def __init__(self, chosen: Chosen, rules: TrackingKwargs, world: World, project: ProjectConfiguration) -> None:
        self._chosen, self._rules, self._world, self._project = chosen, rules, world, project
        self._names = chosen.names
        components = [each.component for each in chosen.selected]
        self.on_every_rank = any(not each.main_process_only for each in components)
        self._components = [each for each in components if world.is_main or not each.main_process_only]
        self._plan: Plan | None = None
        self._recorders: list[Recorder] | None = None
        self._resumed: Mapping[str, Any] = {}
        self._run_id = ""
        self._next_step = 0
        self._process = os.getpid()
        self._starting, self._counting = threading.RLock(), threading.RLock()  # a signal handler may log, too
        self._was_used = self._ended = False
        self._at_exit: Callable[[], None] | None = None
        if chosen.left_out and world.is_main:
            left_out = "\n".join(f"  {name}: {why}" for name, why in chosen.left_out.items())
            logger.warning("log_with='all' records with %s. Left out:\n%s", ", ".join(self._names), left_out)

    @property
    def in_hand(self) -> list[TrackerHandle | GeneralTracker]:
        """The trackers that record in this process."""
        return list(map(self._in_hand, self._components))

    def init(self, project_name: Any, config: object, init_kwargs: _Kwargs, *, resume: bool) -> None:
        options = self._options("init_trackers(init_kwargs=...)", init_kwargs)
        plan = Plan(project_name, readable_config(config) if self._components else {}, options, resume)
        is_another = self._plan is not None and (self._was_used or plan != self._plan)
        if self._names and (self._ended or is_another):
            when = "after end_training()" if self._ended else "a second time"
            what = f"init_trackers({project_name!r}) was called {when}. Call it once, before the first log(); a second run has an"
            raise RuntimeError(f"{what} Accelerator of its own.")
        self._plan = plan

    def log(self, values: _Values, step: _Step, log_kwargs: _Kwargs, *, only: _Text = None) -> None:
        """See `Accelerator.log`; `only` is the name of the one tracker that records."""
        self._record("log", partial(Record, values), step, log_kwargs, only)

    def log_images(
        self, values: _Values, step: _Step, log_kwargs: _Kwargs, dataformats: _Text, *, only: _Text = None
    ) -> None:
        self._record("log_images", partial(as_images, values, dataformats), step, log_kwargs, only)

    def log_table(
        self, name: str, content: tuple[Any, Any, Any], step: _Step, log_kwargs: _Kwargs, *, only: _Text = None
    ) -> None:
        """See `Accelerator.log_table`; `content` is columns, data and dataframe."""
        self._record("log_table", partial(as_table, *content), step, log_kwargs, only, clean(str(name)))

    def _record(
        self, method: str, take: Callable[[], _Content], step: _Step, log_kwargs: _Kwargs, only: _Text, *before: Any
    ) -> None:
        """Hands what `take` returns, and before it other arguments, to a method of every tracker."""
        options = self._options(f"{method}(log_kwargs=...)", log_kwargs)
        number = as_step(step)
        if not self._is_recording(f"{method}()"):
            return
        try:
            content = take()
        except Exception as error:  # whatever methods of the user's objects raise
            if self._rules.strict:
                raise
            self._warn(f"A record of {method}() is left out: {said(error).rstrip('.')}. {_GOES_ON}")
            return
        recorders, load = self._started(), weight(content)
        with self._counting:  # only values count steps
            if number is None:
                number = self._next_step if method == "log" else max(self._next_step - 1, 0)
            if method == "log":
                self._next_step = max(self._next_step, number + 1)
        for each in recorders:
            if only is None or each.name == only:
                each.put(method, (*before, content, number), load, options.get(each.name, {}))
        self._tell()

    def get(self, name: str, unwrap: bool = False) -> Any:
        if name not in self._names:
            raise unknown_tracker("get_tracker()", name, self._names)
        tracker = self.caught_up(name)
        return tracker.tracker if unwrap else self._in_hand(tracker)

    def caught_up(self, name: str) -> Any:
        """The tracker, caught up, also after the end; a blank where it does not record."""
        is_closed = self._ended and self._recorders is not None and os.getpid() == self._process
        is_here = name in map(name_of, self._components)
        if not is_here or not (is_closed or self._is_recording("get_tracker()")):
            return Blank(name)
        recorder = next(each for each in self._started() if each.name == name)
        recorder.catch_up(time.monotonic() + self._rules.stall_timeout)
        self._tell()
        return recorder.tracker if recorder.failure is None else Blank(name)

    def _in_hand(self, tracker: Tracker | GeneralTracker) -> TrackerHandle | GeneralTracker:
        """The user's object for a tracker: a handle, or an older tracker, which needs none."""
        return tracker if isinstance(tracker, GeneralTracker) else TrackerHandle(self, tracker)

    def state(self) -> dict[str, Any]:
        """The recorded run for a checkpoint: project, id, next step, and trackers' states."""
        is_over = os.getpid() != self._process or (self._ended and self._recorders is None)
        if self._plan is None or not self._components or is_over:
            return dict(self._resumed)
        recorders = self._started()
        if not self._ended:
            self._catch_up(recorders)
        before = self._resumed["trackers"] if self._resumed.get("run_id") == self._run_id else {}
        own = {each.name: dict(each.state) for each in recorders if each.was_started}
        run = {"project": self._plan.project, "run_id": self._run_id, "step": self._next_step}
        return {**run, "trackers": {**before, **own}}

    def _catch_up(self, recorders: list[Recorder]) -> None:
        """Has everything logged recorded, within `stall_timeout` for all of them."""
        for each in recorders:
            each.flush()
        deadline = time.monotonic() + self._rules.stall_timeout
        for each in recorders:
            if not each.catch_up(deadline):
                late = f"has not recorded all that was logged before save_state(), which waits {self._rules.stall_timeout:g} s at most"
                self._warn(f"The tracker {each.name!r} {late}: a run that resumes from it may miss, or repeat, some.")
        self._tell()

    def resume(self, state: Mapping[str, Any] | None) -> None:
        """Goes on with the run of a checkpoint, if `state` names one."""
        self._resumed = state or self._resumed
        if state and self._recorders is not None and state["run_id"] == self._run_id:
            self._next_step = state["step"]
        elif state and self._recorders is not None:
            advice = "call load_state() before the first log(), get_tracker() or save_state()"
            logger.warning("The run %r goes on, not %r of the checkpoint: %s.", self._run_id, state["run_id"], advice)

    def finish(self, failed: bool | None = None) -> None:
        """See `Accelerator.end_training`: records the rest and ends within `finish_timeout`."""
        if self._ended or os.getpid() != self._process:
            return
        try:
            if self._plan is not None and self._components:
                self._started()
        finally:
            self._ended = True
            if self._at_exit is not None:
                atexit.unregister(self._at_exit)
            finish(self._recorders or (), self._rules.finish_timeout, failed=is_failing() if failed is None else failed)
        self._tell()

    def details(self) -> dict[str, str]:
        """The status of each tracker, by name, for `explain()`."""
        found = {name: f"left out of 'all': {why}" for name, why in self._chosen.left_out.items()}
        found |= dict.fromkeys(self._names, "records on the main process")
        found |= {name_of(each): "has not begun" for each in self._components}
        for each in self._recorders or ():
            records = f"{'has recorded' if self._ended else 'records'} the run {self._run_id}"
            found[each.name] = records if each.failure is None else f"switched off: {each.failure}"
        return found

    def _is_recording(self, call: str) -> bool:
        """Whether this process records; raises there if `init_trackers` was not called."""
        if self._components and self._plan is None and not self._ended:
            raise RuntimeError(f"{call} came too early: call accelerator.init_trackers('my-project') before.")
        self._was_used = True
        is_another = os.getpid() != self._process
        if self._components and (self._ended or is_another):
            when = "in a process that was forked from the one that records" if is_another else "after end_training()"
            self._warn(f"{call} was called {when}, and is not recorded.")
        return bool(self._components) and not self._ended and not is_another

    def _started(self) -> list[Recorder]:
        """The recorders, all told to start."""
        if self._recorders is None:
            with self._starting:  # which a thread has that was first; this one may be it
                if self._recorders is None:
                    self._begin()
        return self._recorders or []

    def _begin(self) -> None:
        plan = self._plan
        assert plan is not None, "whoever calls this has asked"
        resumed = self._resumed if plan.resume and self._resumed.get("project") == plan.project else {}
        self._run_id = resumed.get("run_id") or new_id(self._world)
        self._next_step = resumed.get("step", 0)
        recorders = [Recorder(each, name_of(each), self._rules) for each in self._components]
        local = [each for each in recorders if each.tracker.requires_logging_directory]
        folder = plan.folder(self._project, self._run_id) if local else None
        for each in recorders:
            config, options = copy.deepcopy(plan.config), plan.options.get(each.name, {})
            place, before = folder if each in local else None, resumed.get("trackers", {}).get(each.name)
            each.start(TrackedRun(plan.project, self._run_id, config, place, options, before, self._next_step))
        if self._recorders is not None:  # a signal handler that logs has begun it meanwhile
            return
        weakref.finalize(self, let_go, recorders, self._process).atexit = False
        # The random streams of the device are left alone: asking for them would wait for it, and no service computes there.
        streams = capture_random_state(None)
        try:
            # Before any begins: what anybody logs meanwhile, `start` itself too, comes after it.
            self._recorders = recorders
            for each in recorders:
                each.begin()
            deadline = time.monotonic() + self._rules.start_timeout
            for each in recorders:
                if not each.wait(left(deadline)):
                    each.give_up(f"start() has taken more than {self._rules.start_timeout:g} s")
        finally:
            restore_random_state(streams, None)
            # After the services' own, so that it runs before them.
            references = list(map(weakref.ref, recorders))
            self._at_exit = partial(finish_at_exit, references, self._rules.finish_timeout, self._process)
            atexit.register(self._at_exit)
        self._tell()

    @cached_property
    def _known(self) -> list[str]:
        return known_names(self._chosen)

    def _options(self, asked: str, given: _Kwargs) -> Mapping[str, Mapping[str, Any]]:
        """Options by the names of trackers, inactive ones too: scripts are written for several."""
        for name in given or ():
            if name not in self._names and name not in self._known:
                raise unknown_tracker(asked, name, self._known)
        return {name: dict(options) for name, options in (given or {}).items()}  # as they are now

    def _tell(self) -> None:
        """Reports, where the training runs, what happened to trackers."""
        for each in self._recorders or ():
            if slow := each.stall():  # no failure, and so no error of `strict` either
                self._warn(slow)
        told = [(each.cause, text) for each in self._recorders or () for text in each.untold()]
        if told and self._rules.strict:
            raise TrackerError("\n".join(text for _, text in told)) from told[0][0]
        for _, text in told:
            self._warn(f"{text.rstrip('.')}. {_GOES_ON}")

    def _warn(self, text: str) -> None:
        try:
            warnings.warn(text, RuntimeWarning, stacklevel=level_of_the_user())
        except RuntimeWarning:  # a filter makes errors of warnings, and a tracker does not end a run
            logger.warning("%s", text)


def new_id(world: World) -> str:
    """The id of a new run, unique also within a second; uses no random stream of the program."""
    of_rank = "" if world.is_main else f"_rank{world.rank}"
    return f"{time.strftime('%Y-%m-%d_%H-%M-%S')}_{secrets.token_hex(4)}{of_rank}"


def as_step(step: Any) -> int | None:
    """The step that a call was given. Raises TypeError or ValueError if services cannot hold it."""
    number = None if step is None else operator.index(step)  # a 0-d tensor of integers has it too
    if number is not None and not 0 <= number < 2**63:
        raise ValueError(f"step={number} was given: expected an integer from 0 to 2**63 - 1, or None.")
    return number


def unknown_tracker(asked: str, name: str, names: Collection[str]) -> ValueError:
    """The error for a name that is none of `names`."""
    advice = f"Type {near!r} if that was meant." if (near := nearest(name, [*names])) else f"Known: {', '.join(names)}."
    return ValueError(f"{asked} names no tracker: {name!r}. {advice}")
