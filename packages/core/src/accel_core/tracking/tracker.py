"""Trackers: objects that record a run where people look at it, in a file or with a service.

New trackers are written as a `Tracker`; `GeneralTracker` is for classes that exist already. Both
are handed plain Python values, and no tensor that the training goes on with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    import torch

    from accel_core.contract.default_components import Recorder
    from accel_core.tracking.values import Bins, Table


@dataclass(frozen=True)
class TrackedRun:
    """The run that a tracker is to record.

    Args:
        project: its project, as given to `init_trackers`.
        run_id: the same for all trackers, and when a run is resumed: letters, digits, "-" and "_".
        config: what the user configured, as JSON has it.
        directory: a folder of this run alone, if the tracker requires one; it need not exist yet.
        options: `init_kwargs[name]`: for the service's own start.
        resumed: what `state()` said in the run that goes on here; None: this is a new run.
        step: the next step; a resumed run records again what it has recorded from here on.
    """

    project: str
    run_id: str
    config: Mapping[str, Any] = field(default_factory=dict)
    directory: Path | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    resumed: Mapping[str, Any] | None = None
    step: int = 0


class Tracker:
    """Base of trackers: offer a subclass under `accel.trackers`, or pass `log_with` an object.

    One object records one run. All methods but the constructor and `unusable` are called in one
    thread of the tracker's own: `start`, any number of records, `finish`. One that raises is
    reported once, and the tracker switched off; behind one that takes minutes, records wait. What
    the service cannot hold is refused by a `RecordRefusedError`, and alone is left out. The
    constructor is the schema of the options, and neither imports the service nor opens anything.

    Attributes:
        name: by which it is asked for: `get_tracker(name)`, `init_kwargs={name: ...}`.
        requires_logging_directory: whether it is given a folder; an attribute or a property.
        main_process_only: whether the main process alone records; else each process for itself.
    """

    name: ClassVar[str] = ""
    if TYPE_CHECKING:  # what attributes and properties may take the place of

        @property
        def requires_logging_directory(self) -> bool: ...  # noqa: D102

    else:
        requires_logging_directory = False
    main_process_only: ClassVar[bool] = True

    @classmethod
    def unusable(cls) -> str | None:
        """The reason why it cannot be used here, and advice; None if it can. Imports no service."""
        return None

    @property
    def tracker(self) -> Any:
        """The service's own object, from `start` on, as of `get_tracker(name, unwrap=True)`."""
        raise NotImplementedError

    def start(self, run: TrackedRun) -> None:
        """Opens the run, again the one that `run.resumed` tells of; stores its configuration."""
        raise NotImplementedError

    def state(self) -> dict[str, Any]:
        """The data, as JSON has it, for `start` to go on. Called after it, and by `save_state`s."""
        return {}

    def log(self, values: Mapping[str, Any], step: int, **options: Any) -> None:
        """Records values: name → int, float (nan and inf too), text, or an object as of `records`.

        Names of nested dicts are joined by "/". `step` is at least 0, and may be an earlier one.
        `options` are `log_kwargs[name]`. If the record has histograms too, `log_histograms` gets
        the same ones: raise a TypeError for those that neither method has.
        """
        raise NotImplementedError

    def records(self, value: object) -> bool:  # noqa: ARG002
        """Whether `log` takes this object, no number or text, as a type of the service's own."""
        return False

    def log_images(self, values: Mapping[str, Sequence[torch.Tensor]], step: int, **options: Any) -> None:
        """Records images: name → uint8 tensors (height, width, 1, 3 or 4 channels) on the CPU.

        Not overridden, as the two below: the tracker has none, which is said once if any come.
        """
        raise NotImplementedError

    def log_table(self, name: str, table: Table, step: int, **options: Any) -> None:
        """Records a table."""
        raise NotImplementedError

    def log_histograms(self, values: Mapping[str, Bins], step: int, **options: Any) -> None:
        """Records histograms by name; a record of these alone has no `log`. Options: as `log`."""
        raise NotImplementedError

    def flush(self) -> None:
        """Makes records readable by others, if without network. Called in `save_state`, pauses."""

    def finish(self, failed: bool) -> None:
        """Closes the run; the last call. `failed`: the run has, or the tracker, perhaps in `start`."""


class GeneralTracker:
    """The older way to write a tracker: pass a subclass's object to `Accelerator(log_with=...)`.

    A subclass has the attributes `name` and `requires_logging_directory`, and `tracker`, the
    service's own object; one that lacks them raises `NotImplementedError` when it is made. Its
    methods are called with plain Python values in place of tensors, in a thread of its own.
    """

    name: Any
    requires_logging_directory: Any
    tracker: Any
    main_process_only: bool = True

    def __init__(self, _blank: bool = False) -> None:
        if _blank:
            return
        known = {*dir(type(self)), *vars(self)}
        missing = [name for name in ("name", "requires_logging_directory", "tracker") if name not in known]
        if missing:
            raise NotImplementedError(f"{type(self).__name__} lacks {', '.join(missing)}: add them to the class.")

    def start(self) -> None:
        """Opens the run. Called once, before everything else."""

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Stores the configuration of the run, as JSON has it."""

    def log(self, values: dict[str, Any], step: int | None, **kwargs: Any) -> None:
        """Records values, nested as the user gave them, with lists in place of tensors."""

    def finish(self) -> None:
        """Closes the run."""


class TrackerHandle:
    """Records with one tracker as the Accelerator does with all: in its thread, in its turn.

    Further attributes are the tracker's, when all is recorded: `handle.writer` of TensorBoard.
    """

    def __init__(self, trackers: Recorder, tracker: Tracker) -> None:
        self._trackers = trackers
        self._tracker = tracker
        self.name: str = tracker.name

    @property
    def tracker(self) -> Any:
        """The service's own object, as of `get_tracker(name, unwrap=True)`. Begins the run."""
        return self._trackers.get(self.name, unwrap=True)

    def log(self, values: Mapping[str, Any], step: int | None = None, **options: Any) -> None:
        """Logs as `Accelerator.log` with this tracker alone; options: its own `log_kwargs`."""
        self._trackers.log(values, step, {self.name: options}, only=self.name)

    def log_images(
        self, values: Mapping[str, Any], step: int | None = None, *, dataformats: str | None = None, **options: Any
    ) -> None:
        """Logs images as `Accelerator.log_images` does, with this tracker alone."""
        self._trackers.log_images(values, step, {self.name: options}, dataformats, only=self.name)

    def log_table(
        self,
        table_name: str,
        columns: Sequence[str] | None = None,
        data: Sequence[Sequence[Any]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
        **options: Any,
    ) -> None:
        """Logs a table as `Accelerator.log_table` does, with this tracker alone."""
        self._trackers.log_table(table_name, (columns, data, dataframe), step, {self.name: options}, only=self.name)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # as copying and pickling ask for
            raise AttributeError(name)
        if not hasattr(type(self._tracker), name) and name not in vars(self._tracker):
            raise AttributeError(f"Neither TrackerHandle nor {type(self._tracker).__name__} has an attribute {name!r}.")
        return getattr(self._trackers.caught_up(self.name), name)
