"""One tracker, and what it is told, in its lane."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from accel_core import GeneralTracker, RecordRefusedError, Tracker
from accel_trackers.recording.logged import Values, View
from accel_trackers.recording.null_tracker import Blank
from accel_trackers.recording.older import OlderAsTracker
from accel_trackers.recording.scalars import LeftOut, describe
from accel_trackers.recording.tracker_thread import Lane

if TYPE_CHECKING:
    import torch

    from accel_core import Table, TrackedRun, TrackingKwargs

_KINDS = {"log": "values", "log_histograms": "histograms", "log_images": "images", "log_table": "tables"}
"""What the methods of trackers record."""


class Recorder:
    """A tracker in its lane. Nothing here waits but `start` and `finish`, and nothing that the tracker does raises.

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
        self._told: Tracker = OlderAsTracker(tracker) if isinstance(tracker, GeneralTracker) else tracker
        self._view: Callable[[Values], View] = Values.nested if isinstance(tracker, GeneralTracker) else Values.joined
        self.lane = Lane(name, rules, self._close, self._flush, threaded=getattr(tracker, "in_thread", True))

    def start(self, run: TrackedRun) -> None:
        """Has the run opened, and its configuration stored."""
        self.lane.put("start()", lambda: self._start(run))

    def log(self, values: Values, step: int, options: Mapping[str, Any]) -> None:
        """Has values recorded."""
        self.lane.put("log()", lambda: self._log(values, step, options), values.weight)

    def log_images(self, images: Mapping[str, list[torch.Tensor]], step: int, options: Mapping[str, Any]) -> None:
        """Has images recorded, as `Tracker.log_images` takes them."""
        size = sum(image.numel() for several in images.values() for image in several)
        images = {name: list(several) for name, several in images.items()}  # its own
        self._put("log_images", (images, step), options, 1 + size // 10_000)

    def log_table(self, name: str, table: Table, step: int, options: Mapping[str, Any]) -> None:
        """Has a table recorded."""
        letters = sum(len(cell) for row in table.rows for cell in row if isinstance(cell, str))
        weight = 1 + len(table.rows) * len(table.columns) // 100 + letters // 10_000
        self._put("log_table", (name, table, step), options, weight)

    def flush(self) -> None:
        """Has what was recorded made readable, and the state brought up to date."""
        self.lane.put("flush()", self._flush)
        self.lane.put("state()", self._remember)

    def unwrapped(self) -> Any:
        """The service's own object; a blank if the tracker has none."""
        try:
            return self.tracker.tracker
        except Exception as error:  # noqa: BLE001  (whatever a property raises)
            self.lane.leave_out(f"its own object: {type(error).__name__}: {error}.")
            return Blank(self.name)

    def finish(self, failed: bool) -> None:
        """Has the run closed, once everything is recorded; does not wait for it."""
        if not self._is_finishing:
            self._is_finishing = True
            self.lane.put("finish()", lambda: self._finish(failed), last=True)

    def _start(self, run: TrackedRun) -> None:
        if getattr(self.tracker, "__dict__", {}).setdefault("_accel_run", run.run_id) != run.run_id:
            raise RuntimeError("this object records another run; give each Accelerator a tracker of its own")
        self.started = self._told is not self.tracker  # an older class may open its run when it is built
        try:
            self._told.start(run)
        except TypeError as error:
            if run.options:  # in which a name may be misspelt
                raise TypeError(
                    f"{error} (given were init_kwargs={{{self.name!r}: ...}} with {', '.join(run.options)})"
                ) from error
            raise
        self.started = self.was_started = True
        self._remember()

    def _flush(self) -> None:
        if self.started:
            self._told.flush()

    def _remember(self) -> None:
        self.state = json.loads(json.dumps(dict(self._told.state())))  # raises here rather than in `save_state`

    def _log(self, values: Values, step: int, options: Mapping[str, Any]) -> None:
        with self.lane.excused():  # the device may be busy
            view = self._view(values)
        known: dict[str, object] = {}
        for name, value in view.others.items():
            if not isinstance(value, LeftOut) and self._told.records(value):
                known[name] = value
            else:
                self.lane.leave_out(_unknown(name, value))
        if view.values or known:
            self._call("log", ({**view.values, **known}, step), options)
        if view.histograms:
            self._call("log_histograms", (dict(view.histograms), step), options)

    def _put(self, method: str, arguments: tuple[Any, ...], options: Mapping[str, Any], weight: int) -> None:
        if self._has(method):
            self.lane.put(f"{method}()", lambda: self._call(method, arguments, options), weight)

    def _call(self, method: str, arguments: tuple[Any, ...], options: Mapping[str, Any]) -> None:
        if not self._has(method):
            return
        try:
            getattr(self._told, method)(*arguments, **options)
        except RecordRefusedError as error:
            kind = _KINDS[method]
            self.lane.leave_out(
                f"{kind} that it cannot hold, and says of the first only: {error}", kind=f"refused {kind}"
            )
        except TypeError as error:
            if not options:  # of which one may be misspelt: that costs the record
                raise
            self.lane.leave_out(f"{_KINDS[method]} with log_kwargs={{{self.name!r}: {dict(options)}}}: {error}")

    def _has(self, method: str) -> bool:
        """Whether the tracker has this method; says so once if it has not."""
        for each in (self.tracker, self._told):
            found = getattr(each, method, None)
            if found is None or getattr(found, "__func__", None) is getattr(Tracker, method):
                self.lane.leave_out(f"{_KINDS[method]}: it has none.")
                return False
        return True

    def _finish(self, failed: bool) -> None:
        self.started = False  # whatever comes of it, it is not closed again
        self._told.finish(failed)

    def _close(self) -> None:
        """After a failure: the record is not complete, but what is in it should be readable."""
        if self.started:
            self._finish(failed=True)


def _unknown(name: str, value: object) -> str:
    return f"the value {name!r}, which is {describe(value).rstrip('.')}: numbers, texts and Histogram(...) can be logged, and dicts of them."
