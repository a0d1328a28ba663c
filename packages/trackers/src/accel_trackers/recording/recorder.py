"""One tracker, and what it is told, in its thread."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from accel_core import GeneralTracker, RecordRefusedError, Tracker
from accel_trackers.recording.null_tracker import Blank
from accel_trackers.recording.record import LeftOut, Record
from accel_trackers.recording.tracker_thread import TrackerThread
from accel_trackers.recording.values import describe

if TYPE_CHECKING:
    import torch

    from accel_core import Table, TrackedRun, TrackingKwargs

_KINDS = {"log": "values", "log_histograms": "histograms", "log_images": "images", "log_table": "tables"}
"""What the methods of trackers record."""


class Recorder:
    """A tracker in its thread. Nothing here waits, and nothing that the tracker does raises.

    Args:
        tracker: what the user chose.
        name: that of the tracker.
        rules: how long it may take.
    """

    def __init__(self, tracker: Tracker | GeneralTracker, name: str, rules: TrackingKwargs) -> None:
        self.tracker = tracker
        self.name = name
        self.state: Mapping[str, Any] = {}
        self.started = self.was_started = False
        self._is_finishing = False
        self._is_older = isinstance(tracker, GeneralTracker)
        self._told: Tracker = _Older(tracker) if isinstance(tracker, GeneralTracker) else tracker
        self.thread = TrackerThread(name, rules, self._close, self._flush)

    def start(self, run: TrackedRun) -> None:
        """Has the run opened, and its configuration stored."""
        self.thread.put("start()", lambda: self._start(run))

    def put(self, method: str, arguments: tuple[Any, ...], weight: int, options: Mapping[str, Any]) -> None:
        """Has a method of the tracker called; `log` gets a `Record`. Last argument: the step."""
        if method == "log_images":
            arguments = {name: list(several) for name, several in arguments[0].items()}, arguments[1]  # its own
        work: Callable[..., None] = self._log if method == "log" else partial(self._call, method)
        self.thread.put(f"{method}()", partial(work, arguments, options), weight)

    def flush(self) -> None:
        """Has what was recorded made readable, and the state brought up to date."""
        self.thread.put("flush()", self._flush)
        self.thread.put("state()", self._remember)

    def unwrapped(self) -> Any:
        """The service's own object; a blank if the tracker has none."""
        try:
            return self.tracker.tracker
        except Exception as error:  # noqa: BLE001  (whatever a property raises)
            self.thread.leave_out(f"its own object: {type(error).__name__}: {error}.")
            return Blank(self.name)

    def finish(self, failed: bool) -> None:
        """Has the run closed, once everything is recorded; does not wait for it."""
        if not self._is_finishing:
            self._is_finishing = True
            self.thread.put("finish()", lambda: self._finish(failed), last=True)

    def _start(self, run: TrackedRun) -> None:
        if getattr(self.tracker, "__dict__", {}).setdefault("_accel_run", run.run_id) != run.run_id:
            raise RuntimeError("this object records another run; give each Accelerator a tracker of its own")
        self.started = self._is_older  # such a class may open its run when it is built
        try:
            self._told.start(run)
        except TypeError as error:
            if run.options:  # in which a name may be misspelt
                given = f"given were init_kwargs={{{self.name!r}: ...}} with {', '.join(run.options)}"
                raise TypeError(f"{error} ({given})") from error
            raise
        self.started = self.was_started = True
        self._remember()

    def _flush(self) -> None:
        if self.started:
            self._told.flush()

    def _remember(self) -> None:
        self.state = json.loads(json.dumps(dict(self._told.state())))  # raises here rather than in `save_state`

    def _log(self, arguments: tuple[Record, int], options: Mapping[str, Any]) -> None:
        record, step = arguments
        with self.thread.excused():  # the device may be busy
            view = record.nested() if self._is_older else record.joined()
        known: dict[str, object] = {}
        for name, value in view.others.items():
            if not isinstance(value, LeftOut) and self._told.records(value):
                known[name] = value
            else:
                found = value.reason if isinstance(value, LeftOut) else describe(value)
                self.thread.leave_out(
                    f"the value {name!r}, which is {found.rstrip('.')}: numbers, texts and Histogram(...) can be logged, and dicts of them."
                )
        if view.values or known:
            self._call("log", ({**view.values, **known}, step), options)
        if view.histograms:
            self._call("log_histograms", (dict(view.histograms), step), options)

    def _call(self, method: str, arguments: tuple[Any, ...], options: Mapping[str, Any]) -> None:
        kind = _KINDS[method]
        for each in (self.tracker, self._told):
            found = getattr(each, method, None)
            if found is None or getattr(found, "__func__", None) is getattr(Tracker, method):
                self.thread.leave_out(f"{kind}: it has none.")
                return
        try:
            getattr(self._told, method)(*arguments, **options)
        except RecordRefusedError as error:
            told = f"{kind} that it cannot hold, and says of the first only: {error}"
            self.thread.leave_out(told, kind=f"refused {kind}")
        except TypeError as error:
            if not options:  # of which one may be misspelt: that costs the record
                raise
            self.thread.leave_out(f"{kind} with log_kwargs={{{self.name!r}: {dict(options)}}}: {error}")

    def _finish(self, failed: bool) -> None:
        self.started = False  # whatever comes of it, it is not closed again
        self._told.finish(failed)

    def _close(self) -> None:
        """After a failure: the record is not complete, but what is in it should be readable."""
        if self.started:
            self._finish(failed=True)


class _Older(Tracker):
    """A `GeneralTracker` as a `Tracker`, without state, start options and histograms."""

    def __init__(self, older: GeneralTracker) -> None:
        self._older: Any = older

    def start(self, run: TrackedRun) -> None:
        self._older.start()
        if run.config:
            self._older.store_init_configuration(dict(run.config))

    def log(self, values: Mapping[str, Any], step: int, **options: Any) -> None:
        """Values are nested as the user gave them."""
        self._older.log(dict(values), step=step, **options)

    def log_images(self, values: Mapping[str, Sequence[torch.Tensor]], step: int, **options: Any) -> None:
        arrays = {name: [image.numpy().copy() for image in several] for name, several in values.items()}
        self._older.log_images(arrays, step, **options)

    def log_table(self, name: str, table: Table, step: int, **options: Any) -> None:
        rows = [list(row) for row in table.rows]
        self._older.log_table(name, list(table.columns), rows, None, step, **options)  # None: a dataframe

    def finish(self, failed: bool) -> None:  # noqa: ARG002
        self._older.finish()
