"""Methods that record with trackers; without trackers they record nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from accel_core.facade.accelerator_parts import AcceleratorParts

if TYPE_CHECKING:
    from accel_core.build import Assembly
    from accel_core.contract.default_components import Recorder
    from accel_core.plugins.explain import Detail
    from accel_core.tracking.handle import TrackerHandle
    from accel_core.tracking.tracker import GeneralTracker


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
        """Says what the trackers of `log_with` record. No collective; on processes that do not record it does nothing.

        They start with the first record, so that a `load_state` in between can go on with the run
        of the checkpoint.

        Args:
            project_name: of the project that the run belongs to.
            config: what the run was configured with: a dict, a dataclass, what argparse returns, or
                anything else; it is stored readably, whatever is in it.
            init_kwargs: for each tracker, by name, what is handed to its service's own start.
            resume: whether the run of a checkpoint of the same project that is loaded goes on;
                False: a new run begins.

        Raises:
            RuntimeError: if the run has begun already.
            TypeError, ValueError: for a name that no tracker has, and arguments of another type.
        """
        if self._trackers is not None:
            self._trackers.init(project_name, config, init_kwargs, resume=resume)

    def log(
        self,
        values: Mapping[str, Any],
        step: int | None = None,
        log_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Records values with every tracker. No collective; it neither waits for a tracker nor for the device.

        The main process records, unless a tracker says otherwise; call it on all. Without trackers
        it does nothing.

        Args:
            values: name → a number, a tensor of one element, a text, a `Histogram`, a service's own
                object, or a dict of these.
            step: at least 0; None: the one after the largest so far. A run that is resumed goes on
                with the step of the checkpoint.
            log_kwargs: for each tracker, by name, what its own log is to be given.

        Raises:
            RuntimeError: before `init_trackers`, on processes that record.
            TypeError, ValueError: for arguments of another type, and a name that no tracker has.
                Values that cannot be recorded, such as two of one name, are left out with a
                warning; under `TrackingKwargs(strict=True)` they are an error, too.
            TrackerError: if a tracker has failed, under `TrackingKwargs(strict=True)`; else that is
                a warning, once.
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
        """Records images with every tracker that has them. No collective; images on a device are waited for.

        Args:
            values: name → an image, or several as a batch or a list. Tensors have their channels
                first, (C, H, W) or (N, C, H, W), arrays last, (H, W, C) or (N, H, W, C); both may
                be (H, W); images of PIL are taken too. C is 1, 3 or 4. Values are uint8, booleans,
                or floats in 0 … 1.
            step: as for `log`; None: the largest one that was logged.
            log_kwargs: as for `log`.
            dataformats: the order of dimensions where it is another one, such as "NHWC".

        Raises:
            As `log`; what is no image is left out with a warning.
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

        Args:
            table_name: its name.
            columns: names of the columns.
            data: rows, each with one cell per column.
            dataframe: of pandas or polars, instead of columns and data.
            step: as for `log`; None: the last one that was logged.
            log_kwargs: as for `log`.

        Raises:
            As `log`; what is no table (rows of other lengths, both or neither of data and
            dataframe) is left out with a warning.
        """
        if self._trackers is not None:
            self._trackers.log_table(table_name, (columns, data, dataframe), step, log_kwargs)

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """A tracker by its name, when all that was handed over to it is recorded, or after `stall_timeout`. No collective.

        Args:
            name: such as "tensorboard".
            unwrap: whether to return the service's own object instead.

        Returns:
            A `TrackerHandle`, which records with this tracker alone by `log`, `log_images` and
            `log_table`, and has the tracker's own attributes; of a `GeneralTracker` itself. Where
            it does not record, on other processes than the main one and once it is switched off, an
            object that takes every call and does nothing.

        Raises:
            ValueError: if `log_with` has no tracker of that name.
        """
        if self._trackers is None:
            raise ValueError(
                f"get_tracker({name!r}) was called, but log_with asks for no tracker. Write Accelerator(log_with={name!r})."
            )
        return self._trackers.get(name, unwrap)

    @property
    def trackers(self) -> list[TrackerHandle | GeneralTracker]:
        """The trackers that record in this process: those of `log_with` on the main process, else none, unless one says otherwise.

        As `get_tracker` gives them, but nothing is begun, or waited for, until they are used.
        """
        return [] if self._trackers is None else self._trackers.in_hand

    @property
    def log_with(self) -> list[str]:
        """The names of the trackers, the same on every process."""
        return [] if self._parts.trackers is None else self._parts.trackers.names

    def _make_recorder(self, parts: Assembly) -> Recorder | None:
        if parts.trackers is None or parts.recorder is None:
            return None
        return parts.recorder(parts.trackers, parts.tracking, self._world, self._project)

    def _details_of_trackers(self) -> list[Detail]:
        from accel_core.plugins.explain import Detail

        details = {} if self._trackers is None else self._trackers.details()
        return [Detail("tracker", name, "state", text) for name, text in details.items()]
