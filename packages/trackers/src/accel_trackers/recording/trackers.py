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
import os
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from accel_core import GeneralTracker, TrackedRun, Tracker, TrackerError, TrackerHandle
from accel_core.api.component import capture_random_state, restore_random_state
from accel_core.api.tracker import known_names, level_of_the_user, name_of
from accel_trackers.recording.arguments import Plan, as_step, check_mapping, new_id, unknown_tracker
from accel_trackers.recording.config_json import readable_config
from accel_trackers.recording.images import as_images
from accel_trackers.recording.null_tracker import Blank
from accel_trackers.recording.record import Record
from accel_trackers.recording.recorder import Recorder
from accel_trackers.recording.shutdown import finish, finish_at_exit, is_failing, left, let_go
from accel_trackers.recording.tables import as_table

if TYPE_CHECKING:
    from accel_core import ProjectConfiguration, TrackingKwargs, World
    from accel_core.api.tracker import Chosen

_MOMENT = 0.2  # seconds more than a tracker may take for one record, so that one that stalls has taken too long
Options = Mapping[str, Any] | None
Take = Callable[[], tuple[tuple[Any, ...], int]]

_GOES_ON = "The training goes on; TrackingKwargs(strict=True) would end it."

logger = logging.getLogger(__name__)


class Trackers:
    """Records the run of one process, as far as it records.

    Args:
        chosen: the trackers.
        rules: how failures are treated.
        world: the processes.
        project: where local trackers write.
    """

    def __init__(self, chosen: Chosen, rules: TrackingKwargs, world: World, project: ProjectConfiguration) -> None:
        self._chosen, self._rules, self._world, self._project = chosen, rules, world, project
        self._names = chosen.names
        components = [each.component for each in chosen.selected]
        self.on_every_rank = any(not each.main_process_only for each in components)
        self._components = [each for each in components if world.is_main or not each.main_process_only]
        self._takes_objects = any(
            isinstance(each, GeneralTracker) or type(each).records is not Tracker.records for each in self._components
        )
        self._plan: Plan | None = None
        self._recorders: list[Recorder] | None = None
        self._resumed: Mapping[str, Any] = {}
        self._run_id = ""
        self._next_step = 0
        self._process = os.getpid()
        self._starting, self._counting = threading.RLock(), threading.RLock()  # a signal handler may log, too
        self._is_starting = self._was_used = self._ended = False
        self._at_exit: Callable[[], None] | None = None
        if chosen.left_out and world.is_main:
            left_out = "\n".join(f"  {name}: {why}" for name, why in chosen.left_out.items())
            names = ", ".join(self._names) or "nothing"
            logger.warning("log_with='all' records with %s. Left out:\n%s", names, left_out)

    @property
    def in_hand(self) -> list[TrackerHandle | GeneralTracker]:
        """The trackers that record in this process."""
        return list(map(self._in_hand, self._components))

    def init(self, project_name: object, config: object, init_kwargs: Options, *, resume: bool) -> None:
        """See `Accelerator.init_trackers`."""
        if not isinstance(project_name, str) or not project_name.strip():
            raise TypeError(f"init_trackers({project_name!r}): expected the name of the project, such as 'my-project'.")
        options = self._options("init_trackers(init_kwargs=...)", init_kwargs)
        plan = Plan(project_name, readable_config(config) if self._components else {}, options, resume)
        if self._names and (self._ended or (self._plan is not None and (self._was_used or plan != self._plan))):
            before = f"a second time, after that for {self._plan.project!r}" if self._plan else "after end_training()"
            raise RuntimeError(
                f"init_trackers({project_name!r}) was called {before}. Call it once, before the first log(); a second run has an "
                f"Accelerator of its own."
            )
        self._plan = plan

    def log(self, values: Mapping[str, Any], step: int | None, log_kwargs: Options, *, only: str | None = None) -> None:
        """See `Accelerator.log`; `only` is the name of the one tracker that records."""
        check_mapping("log()", values)

        def take() -> tuple[tuple[Any, ...], int]:
            record = Record(values, objects=self._takes_objects)
            return (record,), record.weight

        self._record("log", step, log_kwargs, take, only)

    def log_images(
        self,
        values: Mapping[str, Any],
        step: int | None,
        log_kwargs: Options,
        dataformats: str | None,
        *,
        only: str | None = None,
    ) -> None:
        """See `Accelerator.log_images`."""
        check_mapping("log_images()", values)

        def take() -> tuple[tuple[Any, ...], int]:
            images = as_images(values, dataformats)
            return (images,), 1 + sum(image.numel() for several in images.values() for image in several) // 10_000

        self._record("log_images", step, log_kwargs, take, only)

    def log_table(
        self,
        name: str,
        content: tuple[Any, Any, Any],
        step: int | None,
        log_kwargs: Options,
        *,
        only: str | None = None,
    ) -> None:
        """See `Accelerator.log_table`; `content` is columns, data and dataframe."""
        if not isinstance(name, str):
            raise TypeError(f"log_table() was given the name {name!r}, a {type(name).__name__}: expected a text.")

        def take() -> tuple[tuple[Any, ...], int]:
            table = as_table(*content)
            letters = sum(len(cell) for row in table.rows for cell in row if isinstance(cell, str))
            return (name, table), 1 + len(table.rows) * len(table.columns) // 100 + letters // 10_000

        self._record("log_table", step, log_kwargs, take, only)

    def _record(self, method: str, step: int | None, log_kwargs: Options, take: Take, only: str | None) -> None:
        """Hands what `take` returns, a content and its weight, to a method of every tracker."""
        options = self._options(f"{method}(log_kwargs=...)", log_kwargs)
        number = as_step(f"{method}()", step)
        if not self._is_recording(f"{method}()"):
            return
        try:
            content, weight = take()
        except Exception as error:  # whatever methods of the user's objects raise
            if self._rules.strict:
                raise
            kind = "" if isinstance(error, (TypeError, ValueError)) else f"{type(error).__name__}: "
            self._warn(f"A record is left out: {kind}{str(error).rstrip('.')}. {_GOES_ON}")
            return
        recorders = self._started()
        if not recorders:
            self._warn(f"{method}() was called while the trackers are being started, and is not recorded.")
            return
        number = self._at(number, advance=method == "log")
        for each in recorders:
            if only is None or each.name == only:
                each.put(method, (*content, number), weight, options.get(each.name, {}))
        self._tell()

    def get(self, name: str, unwrap: bool = False) -> Any:
        """See `Accelerator.get_tracker`."""
        if name not in self._names:
            raise ValueError(unknown_tracker(f"get_tracker({name!r})", name, self._names, "log_with has"))
        tracker = self.caught_up(name)
        if isinstance(tracker, Blank) or not unwrap:
            return tracker if isinstance(tracker, Blank) else self._in_hand(tracker)
        return next(each for each in self._started() if each.name == name).unwrapped()

    def caught_up(self, name: str) -> Any:
        """The tracker, caught up, also after the end; a blank where it does not record."""
        is_closed = self._ended and self._recorders is not None and os.getpid() == self._process
        is_here = any(name_of(each) == name for each in self._components)
        if not is_here or not (is_closed or self._is_recording("get_tracker()")):
            return Blank(name)
        recorder = next((each for each in self._started() if each.name == name), None)
        if recorder is None:  # they are being started
            return Blank(name)
        recorder.thread.wait(self._rules.stall_timeout)
        self._tell()
        return recorder.tracker if recorder.thread.failure is None else Blank(name)

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

    def _catch_up(self, recorders: Sequence[Recorder]) -> None:
        """Has everything logged recorded, within the time that one record may take."""
        for each in recorders:
            each.flush()
        deadline = time.monotonic() + self._rules.stall_timeout + _MOMENT
        for each in recorders:
            if not each.thread.wait(max(deadline - time.monotonic(), 0.0)) and not each.thread.give_up_if_stalled():
                self._warn(
                    f"The tracker {each.name!r} has not recorded within {self._rules.stall_timeout:g} s what was logged before "
                    f"save_state(): a run that resumes from it may miss, or repeat, some."
                )
        self._tell()

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
            begun = "restored a checkpoint of the run %r, but the run %r has begun to be recorded, and is gone on with"
            advice = "To go on with the other, call load_state() before the first log(), get_tracker() or save_state()."
            logger.warning(f"load_state() {begun}. {advice}", state["run_id"], self._run_id)

    def finish(self, failed: bool | None = None) -> None:
        """See `Accelerator.end_training`: records the rest and ends within `finish_timeout`."""
        if self._ended or os.getpid() != self._process:
            return
        try:
            recorders = self._started() if self._plan is not None and self._components else []
        finally:
            self._ended = True
            if self._at_exit is not None:
                atexit.unregister(self._at_exit)
                self._at_exit = None
            finish(self._recorders or (), self._rules.finish_timeout, failed=is_failing() if failed is None else failed)
        if recorders:
            self._tell()

    def details(self) -> dict[str, str]:
        """The status of each tracker, by name, for `explain()`."""
        found = {name: f"left out of 'all': {why}" for name, why in self._chosen.left_out.items()}
        found |= dict.fromkeys(self._names, "records on the main process")
        found |= {name_of(each): "has not begun" for each in self._components}
        for each in self._recorders or ():
            records = f"{'has recorded' if self._ended else 'records'} the run {self._run_id}"
            found[each.name] = records if each.thread.failure is None else f"switched off: {each.thread.failure}"
        return found

    @cached_property
    def _known(self) -> list[str]:
        return known_names(self._chosen)

    def _is_recording(self, call: str) -> bool:
        """Whether this process records; raises there if `init_trackers` was not called."""
        if not self._components:
            self._was_used = True
            return False
        if self._plan is None and not self._ended:
            raise RuntimeError(
                f"{call} was called before init_trackers(), so {', '.join(self._names)} cannot know what is recorded. Call "
                f"accelerator.init_trackers('my-project') first."
            )
        self._was_used = True
        if self._ended or os.getpid() != self._process:
            when = "after end_training()" if self._ended else "in a process that was forked from the one that records"
            where = "Call end_training() last" if self._ended else "Return what is to be recorded to that one"
            self._warn(f"{call} was called {when}, and is not recorded. {where}.")
            return False
        return True

    def _at(self, step: int | None, *, advance: bool = True) -> int:
        """The step of a record: the given one, else the next. Only values count steps."""
        with self._counting:
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
        """The recorders, all told to start; none for a call that interrupts their making."""
        if self._recorders is None:
            with self._starting:  # which a thread has that was first; this one may be it
                if not self._is_starting:
                    self._is_starting = True
                    try:
                        self._begin()
                    finally:
                        self._is_starting = self._recorders is not None
        return self._recorders or []

    def _begin(self) -> None:
        plan = self._plan
        assert plan is not None, "whoever calls this has asked"
        goes_on = self._goes_on()
        self._run_id = self._resumed["run_id"] if goes_on else new_id(self._world)
        self._next_step = self._resumed["step"] if goes_on else 0
        before = self._resumed["trackers"] if goes_on else {}
        recorders = [Recorder(each, name_of(each), self._rules) for each in self._components]
        needs_folder = [each.tracker.requires_logging_directory for each in recorders]
        folder = plan.folder(self._project, self._run_id) if any(needs_folder) else None
        weakref.finalize(self, let_go, recorders, self._process).atexit = False
        # The random streams of the device are left alone: asking for them would wait for it, and no service computes there.
        streams = capture_random_state(None)
        try:
            for each, needs in zip(recorders, needs_folder, strict=True):
                config, options = copy.deepcopy(plan.config), plan.options.get(each.name, {})
                place, resumed = folder if needs else None, before.get(each.name)
                each.start(TrackedRun(plan.project, self._run_id, config, place, options, resumed, self._next_step))
            # Before any begins: what anybody logs meanwhile, `start` itself too, comes after it.
            self._recorders = recorders
            for each in recorders:
                each.thread.begin()
            deadline = time.monotonic() + self._rules.start_timeout
            for each in recorders:
                if not each.thread.wait(left(deadline)):
                    each.thread.give_up(f"start() has taken more than {self._rules.start_timeout:g} s")
        finally:
            restore_random_state(streams, None)
            # After the services' own, so that it runs before them.
            self._at_exit = partial(finish_at_exit, list(map(weakref.ref, recorders)), self._rules, self._process)
            atexit.register(self._at_exit)
        self._tell()

    def _options(self, asked: str, given: Mapping[str, Any] | None) -> Mapping[str, Mapping[str, Any]]:
        """Options by the names of trackers, inactive ones too: scripts are written for several."""
        if not given:
            return {}
        check_mapping(asked, given)
        for name, options in given.items():
            if name not in self._names and name not in self._known:
                raise ValueError(unknown_tracker(f"{asked} has {name!r}, which", name, self._known, "Known are"))
            check_mapping(f"{asked}[{name!r}]", options)
        return {name: dict(options) for name, options in given.items()}  # as they are now

    def _tell(self) -> None:
        """Reports, where the training runs, what happened to trackers."""
        told = [(each.thread.cause, text) for each in self._recorders or () for text in each.thread.untold()]
        if told and self._rules.strict:
            texts = "\n".join(text for _, text in told)
            raise TrackerError(f"{texts}\nTrackingKwargs(strict=True) has the run end with it.") from told[0][0]
        for _, text in told:
            self._warn(f"{text.rstrip('.')}. {_GOES_ON}")

    def _warn(self, text: str) -> None:
        try:
            warnings.warn(text, RuntimeWarning, stacklevel=level_of_the_user())
        except RuntimeWarning:  # a filter makes errors of warnings, and a tracker does not end a run
            logger.warning("%s", text)
