"""Trackers: objects that record a run where people look at it, in a file or with a service.

New trackers are written as a `Tracker`; `GeneralTracker` is an older spelling, for classes that
exist already. Both are handed plain Python values, and no tensor that the training goes on with. An
object of another type is handed, as it is, to those that take it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    import torch

    from accel_core.tracking.values import Bins, Table


@dataclass(frozen=True)
class TrackedRun:
    """The run that a tracker is to record.

    Args:
        project: its project, as given to `init_trackers`.
        run_id: of this run: the same for all trackers, and again when a run is resumed. Letters,
            digits, "-" and "_"; fit to be the id of the run with a service.
        config: what the user configured, as JSON has it.
        directory: a folder of this run alone, which need not exist yet; None unless the tracker
            requires one.
        options: `init_kwargs[name]`: what the user wants to be handed to the service's own start.
        resumed: what `state()` said in the run that goes on here; None: this is a new run.
        step: the next step that will be recorded if nobody says another. What a resumed run has
            recorded from here on is going to be recorded again.
    """

    project: str
    run_id: str
    config: Mapping[str, Any] = field(default_factory=dict)
    directory: Path | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    resumed: Mapping[str, Any] | None = None
    step: int = 0


class Tracker:
    """Records runs; subclass it, and offer the class under `accel.trackers`, or pass an object to `Accelerator(log_with=...)`.

    One object records one run. All methods but the constructor and `unusable` are called in one
    thread of the tracker's own, one after the other: `start`, any number of records, `finish`. One
    that raises is reported once and the tracker is switched off; the training goes on. A record
    that the service cannot hold is refused by a `RecordRefusedError`, and only that one is left
    out. A method that takes minutes is given up.

    The constructor is the schema of the tracker's options. It neither imports the service nor opens
    anything.

    Attributes:
        name: by which it is asked for: `get_tracker(name)`, `init_kwargs={name: ...}`.
        requires_logging_directory: whether it is given a folder; an attribute or a property.
        main_process_only: whether the main process alone records; else every process does, each for
            itself.
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
        """The reason why it cannot be used here, and what to type; None if it can.

        Imports no service; `importlib.util.find_spec` says enough.
        """
        return None

    @property
    def tracker(self) -> Any:
        """The service's own object for the run, from `start` on: what `get_tracker(name, unwrap=True)` returns."""
        raise NotImplementedError

    def start(self, run: TrackedRun) -> None:
        """Opens the run, or the one again that `run.resumed` tells of, and stores its configuration."""
        raise NotImplementedError

    def state(self) -> dict[str, Any]:
        """The data that `start` needs to go on with this run, as JSON has it: often the run's id.

        Called after `start`, and by every `save_state`, when all that was logged before it is
        recorded.
        """
        return {}

    def log(self, values: Mapping[str, Any], step: int, **options: Any) -> None:
        """Records values: name → int, float (also nan and inf), text, or an object that `records` accepts.

        Names of nested dicts are joined by "/". `step` is at least 0, and may be an earlier one
        again. `options` are `log_kwargs[name]` of the user's call. If the record has histograms
        too, `log_histograms` is given the same ones: pass over those that only the other method
        has, and raise a TypeError that names what neither has.
        """
        raise NotImplementedError

    def records(self, value: object) -> bool:  # noqa: ARG002
        """Whether `log` takes this object, which is no number and no text, as it is: one of the service's own types.

        Tensors are copies on the host; of a list the list itself is a copy, and not what stands in it.
        """
        return False

    def log_images(self, values: Mapping[str, Sequence[torch.Tensor]], step: int, **options: Any) -> None:
        """Records images: name → tensors (height, width, channels), uint8, on the CPU, with 1, 3 or 4 channels.

        Not overridden: the tracker has no images, which is said once where there are some.
        """
        raise NotImplementedError

    def log_table(self, name: str, table: Table, step: int, **options: Any) -> None:
        """Records a table. Not overridden: the tracker has no tables, which is said once where there is one."""
        raise NotImplementedError

    def log_histograms(self, values: Mapping[str, Bins], step: int, **options: Any) -> None:
        """Records histograms by name; for the options see `log`. A record of histograms alone reaches this method only.

        Not overridden: the tracker has none, which is said once where there is one.
        """
        raise NotImplementedError

    def flush(self) -> None:
        """Makes what was recorded readable by others as far as that takes no network. Called when nothing was logged for seconds, and
        in `save_state`.
        """

    def finish(self, failed: bool) -> None:
        """Closes the run; nothing is called after it.

        `failed`: whether the run did, as `end_training` was told, or found; whether an exception
        ended the program before; or the tracker was switched off.
        """


class GeneralTracker:
    """The older way to write a tracker: subclass it, and pass an object of the class to `Accelerator(log_with=...)`.

    A subclass has the attributes `name` and `requires_logging_directory`, and `tracker`, the
    service's own object. Its methods are called with plain Python values in place of tensors, in a
    thread of its own.

    Attributes:
        main_process_only: whether the main process alone records; else every process does, each for
            itself.

    Raises:
        NotImplementedError: if the class lacks one of the three, naming all that are missing.
    """

    name: Any
    requires_logging_directory: Any
    tracker: Any
    main_process_only: bool = True

    def __init__(self, _blank: bool = False) -> None:
        if _blank:
            return
        missing = [name for name in ("name", "requires_logging_directory", "tracker") if not hasattr(type(self), name)]
        missing = [name for name in missing if name not in vars(self)]
        if missing:
            raise NotImplementedError(
                f"{type(self).__name__} lacks {', '.join(missing)}, which a GeneralTracker has as attributes of its class. Add "
                f"them: name = '...', requires_logging_directory = False, and tracker as a property."
            )

    def start(self) -> None:
        """Opens the run. Called once, before everything else."""

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Stores the configuration of the run, as JSON has it."""

    def log(self, values: dict[str, Any], step: int | None, **kwargs: Any) -> None:
        """Records values, nested as the user gave them, with lists in place of tensors."""

    def finish(self) -> None:
        """Closes the run."""
