"""Classes of the older spelling as trackers of the newer one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from accel_core import GeneralTracker, Tracker

if TYPE_CHECKING:
    import torch

    from accel_core import Table, TrackedRun


class OlderAsTracker(Tracker):
    """A `GeneralTracker` as a `Tracker`: it has no state, no options at its start, and no histograms."""

    def __init__(self, older: GeneralTracker) -> None:
        self._older = older

    def start(self, run: TrackedRun) -> None:
        """See `Tracker.start`."""
        self._older.start()
        if run.config:
            self._older.store_init_configuration(dict(run.config))

    def log(self, values: Mapping[str, Any], step: int, **options: Any) -> None:
        """Records values nested as the user gave them."""
        self._older.log(dict(values), step=step, **options)

    def log_images(self, values: Mapping[str, Sequence[torch.Tensor]], step: int, **options: Any) -> None:
        """Records the images as arrays."""
        arrays = {name: [image.numpy().copy() for image in several] for name, several in values.items()}
        self._older.log_images(arrays, step, **options)  # type: ignore[attr-defined]  # some classes have it

    def log_table(self, name: str, table: Table, step: int, **options: Any) -> None:
        """Records the table as lists, with None in place of a dataframe."""
        rows = [list(row) for row in table.rows]
        self._older.log_table(name, list(table.columns), rows, None, step, **options)  # type: ignore[attr-defined]  # see above

    def finish(self, failed: bool) -> None:  # noqa: ARG002
        """See `GeneralTracker.finish`."""
        self._older.finish()
