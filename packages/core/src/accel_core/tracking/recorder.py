"""One tracker and what it is told: its two spellings, behind one interface, in its lane."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from accel_core.tracking.blank import Blank
from accel_core.tracking.lane import Lane
from accel_core.tracking.leaves import LeftOut, describe
from accel_core.tracking.rules import RecordRefusedError
from accel_core.tracking.tracker import GeneralTracker, Tracker
from accel_core.tracking.values import flatten

if TYPE_CHECKING:
    from accel_core.tracking.rules import TrackingKwargs
    from accel_core.tracking.snapshot import Snapshot
    from accel_core.tracking.tracker import TrackedRun
    from accel_core.tracking.values import Bins, Flat, Table


class Values:
    """The values of one `log`, brought to the host once, by the first tracker that wants them."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot
        self._lock = threading.Lock()
        self._tree: dict[str, Any] | None = None
        self._flat: Flat | None = None
        self._bins: dict[str, Bins] = {}

    @property
    def weight(self) -> int:
        """As how many records they count while they wait."""
        return 1 + self._snapshot.elements // 10_000

    def tree(self) -> dict[str, Any]:
        """Plain values, nested as the user gave them."""
        with self._lock:
            if self._tree is None:
                self._tree = self._snapshot.resolve()
            return self._tree

    def flat(self) -> tuple[Flat, dict[str, Bins]]:
        """The same by joined names, and the histograms."""
        tree = self.tree()
        with self._lock:
            if self._flat is None:
                self._flat = flatten(tree)
                self._bins = {name: each.resolve() for name, each in self._flat.histograms.items()}
            return self._flat, self._bins


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
        self.lane = Lane(name, rules, self._close, self._flush, threaded=getattr(tracker, "in_thread", True))

    def start(self, run: TrackedRun) -> None:
        """Has the run opened, and its configuration stored."""
        self.lane.put("start()", lambda: self._start(run))

    def log(self, values: Values, step: int, options: Mapping[str, Any]) -> None:
        """Has values recorded."""
        self.lane.put("log()", lambda: self._log(values, step, options), values.weight)

    def log_images(self, images: Mapping[str, list[Any]], step: int, options: Mapping[str, Any]) -> None:
        """Has images recorded, as `Tracker.log_images` takes them."""
        size = sum(image.numel() for several in images.values() for image in several)
        images = {name: list(several) for name, several in images.items()}  # its own
        self._extra("images", "log_images", (images, step), options, weight=1 + size // 10_000)

    def log_table(self, name: str, table: Table, step: int, options: Mapping[str, Any]) -> None:
        """Has a table recorded."""
        weight = 1 + len(table.rows) * len(table.columns) // 100
        self._extra("tables", "log_table", self._table(name, table, step), options, weight)

    def flush(self) -> None:
        """Has what was recorded made readable, and the state brought up to date."""
        if isinstance(self.tracker, Tracker):
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
            self.lane.put("finish()", lambda: self._finish(failed))
            self.lane.end()

    def _start(self, run: TrackedRun) -> None:
        if getattr(self.tracker, "__dict__", {}).setdefault("_accel_run", run.run_id) != run.run_id:
            raise RuntimeError("this object records another run; give each Accelerator a tracker of its own")
        if isinstance(self.tracker, GeneralTracker):
            self.started = self.was_started = True
            self.tracker.start()
            if run.config:
                self.tracker.store_init_configuration(dict(run.config))
            return
        try:
            self.tracker.start(run)
        except TypeError as error:
            if run.options:  # in which a name may be misspelt
                raise TypeError(
                    f"{error} (given were init_kwargs={{{self.name!r}: ...}} with {', '.join(run.options)})"
                ) from error
            raise
        self.started = self.was_started = True
        self._remember()

    def _flush(self) -> None:
        if self.started and isinstance(self.tracker, Tracker):
            self.tracker.flush()

    def _remember(self) -> None:
        assert isinstance(self.tracker, Tracker), "older ones have no state"
        self.state = json.loads(json.dumps(dict(self.tracker.state())))  # raises here rather than in `save_state`

    def _log(self, values: Values, step: int, options: Mapping[str, Any]) -> None:
        with self.lane.excused():  # the device may be busy
            tree, (flat, bins) = values.tree(), values.flat()
        if isinstance(self.tracker, GeneralTracker):
            self.tracker.log(self._nested(tree), step=step, **options)
            return
        known = {name: each for name, each in flat.others.items() if self.tracker.records(each)}
        for name in flat.others.keys() - known.keys():
            self.lane.leave_out(_unknown(name, flat.others[name]))
        nonfinite = {f"{name}/nonfinite": each.nonfinite for name, each in bins.items() if each.nonfinite}
        if flat.numbers_and_texts or known or nonfinite:
            self._call("values", self.tracker.log, {**flat.numbers_and_texts, **nonfinite, **known}, step, **options)
        if bins:
            self._call("histograms", self.tracker.log_histograms, bins, step)

    def _nested(self, tree: Mapping[str, Any], above: str = "") -> dict[str, Any]:
        """For an older tracker, which knows numbers and lists, but no tensors."""
        found: dict[str, Any] = {}
        for name, value in tree.items():
            if isinstance(value, dict):
                found[name] = self._nested(value, f"{above}{name}/")
            elif isinstance(value, LeftOut):
                self.lane.leave_out(_unknown(f"{above}{name}", value))
            else:
                found[name] = value.tolist() if isinstance(value, torch.Tensor) else value
        return found

    def _extra(
        self, kind: str, method: str, arguments: tuple[Any, ...], options: Mapping[str, Any], weight: int
    ) -> None:
        call = getattr(self.tracker, method, None)
        if call is None:
            self.lane.leave_out(_unable(kind))
            return
        self.lane.put(f"{method}()", lambda: self._call(kind, call, *arguments, **options), weight)

    def _call(self, kind: str, call: Callable[..., None], *arguments: Any, **options: Any) -> None:
        if kind == "images" and isinstance(self.tracker, GeneralTracker):  # which knows arrays
            images, *others = arguments
            arrays = {name: [image.numpy().copy() for image in several] for name, several in images.items()}
            arguments = (arrays, *others)
        try:
            call(*arguments, **options)
        except RecordRefusedError as error:
            self.lane.leave_out(
                f"{kind} that it cannot hold, and says of the first only: {error}", kind=f"refused {kind}"
            )
        except NotImplementedError:
            self.lane.leave_out(_unable(kind))

    def _table(self, name: str, table: Table, step: int) -> tuple[Any, ...]:
        if isinstance(self.tracker, Tracker):
            return name, table, step
        return name, list(table.columns), [list(row) for row in table.rows], None, step  # as older trackers take it

    def _finish(self, failed: bool) -> None:
        self.started = False  # whatever comes of it, it is not closed again
        if isinstance(self.tracker, GeneralTracker):
            self.tracker.finish()
        else:
            self.tracker.finish(failed)

    def _close(self) -> None:
        """After a failure: the record is not complete, but what is in it should be readable."""
        if self.started:
            self._finish(failed=True)


def _unknown(name: str, value: object) -> str:
    return f"the value {name!r}, which is {describe(value).rstrip('.')}: numbers, texts and Histogram(...) can be logged, and dicts of them."


def _unable(kind: str) -> str:
    return f"{kind}: it has none."
