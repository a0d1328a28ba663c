"""Methods that record with trackers; without trackers they record nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from accel_core.facade.accelerator_parts import AcceleratorParts

if TYPE_CHECKING:
    from accel_core.tracking.tracker import GeneralTracker, TrackerHandle


class RecordingMethods(AcceleratorParts):
    """The methods that are about trackers."""

    def init_trackers(
        self,
        project_name: str,
        config: object = None,
        init_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
        *,
        resume: bool = True,
    ) -> None:
        """Says what the trackers of `log_with` record, on processes that do. No collective.

        They start with the first record, so that a `load_state` in between can go on with the run
        of the checkpoint, unless `resume=False`. `config` is stored readably, whatever it is;
        `init_kwargs[name]` goes to that service's own start. `RuntimeError` if the run has begun.
        """
        if self._trackers is not None:
            self._trackers.init(project_name, config, init_kwargs, resume=resume)

    def log(
        self,
        values: Mapping[str, Any],
        step: int | None = None,
        log_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Records values with every tracker, waiting for none, nor for the device. No collective.

        `values` maps names to numbers, tensors of one element, texts, `Histogram`s, a service's own
        objects, or dicts of these. `step` is at least 0; None: the one after the largest so far.
        `log_kwargs[name]` goes to that tracker's own log. `RuntimeError` before `init_trackers`. What
        cannot be recorded and failing trackers are warnings; with `TrackingKwargs(strict=True)` errors.
        """
        if self._trackers is not None:
            self._trackers.log(values, step, log_kwargs)

    def log_images(
        self,
        values: Mapping[str, Any],
        step: int | None = None,
        log_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
        *,
        dataformats: str | None = None,
    ) -> None:
        """Records images with trackers that have them. No collective; waits for images on a device.

        `values` maps names to one image or several: tensors ([N,] C, H, W), arrays ([N,] H, W, C),
        both also (H, W), or images of PIL; `dataformats` names another order, such as "NHWC". C is 1,
        3 or 4; values are uint8, booleans, or floats in 0 … 1. `step` None: the largest one logged.
        """
        if self._trackers is not None:
            self._trackers.log_images(values, step, log_kwargs, dataformats)

    def log_table(
        self,
        table_name: str,
        columns: Sequence[str] | None = None,
        data: Sequence[Sequence[Any]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
        log_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Records a table with every tracker that has them. No collective.

        Give `columns` (names) and `data` (rows with a cell per column), or a `dataframe` of pandas
        or polars. `step`: None is the last one that was logged.
        """
        if self._trackers is not None:
            self._trackers.log_table(table_name, (columns, data, dataframe), step, log_kwargs)

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """A tracker by name, when all is recorded, or after `stall_timeout`. No collective.

        A `TrackerHandle`, which records with this tracker alone; a `GeneralTracker` itself; with
        `unwrap` the service's own object. Where it does not record, an object that does nothing.
        """
        if self._trackers is None:
            raise ValueError(f"get_tracker({name!r}) was called, but log_with asks for none. Write log_with={name!r}.")
        return self._trackers.get(name, unwrap)

    @property
    def trackers(self) -> list[TrackerHandle | GeneralTracker]:
        """The trackers that record in this process. They begin, and are waited for, at use."""
        return [] if self._trackers is None else self._trackers.in_hand

    @property
    def log_with(self) -> list[str]:
        """The names of the trackers, the same on every process."""
        return list(self._parts.trackers)
