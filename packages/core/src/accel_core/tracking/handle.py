"""One tracker of a run, in the hands of the user: what `get_tracker` and `accelerator.trackers` give."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from accel_core.contract.default_components import Recorder
    from accel_core.tracking.tracker import Tracker


class TrackerHandle:
    """Records with one tracker as the Accelerator does with all: in its turn, in the tracker's thread, with a failure isolated.

    What it does not have itself it takes from the tracker: `handle.writer` of TensorBoard,
    `handle.run` of Weights & Biases. Those are the service's own objects: they are used in the
    caller's thread, when everything so far is recorded, and raise what they raise. Made by the
    Accelerator.
    """

    def __init__(self, trackers: Recorder, tracker: Tracker) -> None:
        self._trackers = trackers
        self._tracker = tracker
        self.name: str = tracker.name

    @property
    def tracker(self) -> Any:
        """The service's own object, as `get_tracker(name, unwrap=True)` returns it. Begins the run."""
        return self._trackers.get(self.name, unwrap=True)

    def log(self, values: Mapping[str, Any], step: int | None = None, **options: Any) -> None:
        """Logs as `Accelerator.log` does, with this tracker alone; the options are its own `log_kwargs`."""
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
            raise AttributeError(
                f"Neither {type(self).__name__} nor {type(self._tracker).__name__} has an attribute {name!r}."
            )
        return getattr(self._trackers.caught_up(self.name), name)

    def __repr__(self) -> str:
        return f"<the tracker {self.name!r}>"
