"""The component for `log_with`, found under a default name: it records with the chosen trackers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol

if TYPE_CHECKING:
    from accel_core.options.handlers import TrackingKwargs
    from accel_core.options.project import ProjectConfiguration
    from accel_core.processes.world import World
    from accel_core.tracking.selection import Chosen

GROUP: Final = "accel.recorders"
"""The group of entry points."""
NAME: Final = "background"
"""The default name in it."""


class Recorder(Protocol):
    """Records the run of one process, as far as it records."""

    @property
    def on_every_rank(self) -> bool:
        """Whether ranks record something of their own."""

    @property
    def in_hand(self) -> list[Any]:
        """See `Accelerator.trackers`."""

    def init(
        self, project_name: object, config: object, init_kwargs: Mapping[str, Any] | None, *, resume: bool
    ) -> None:
        """See `Accelerator.init_trackers`."""

    def log(
        self,
        values: Mapping[str, Any],
        step: int | None,
        log_kwargs: Mapping[str, Any] | None,
        *,
        only: str | None = None,
    ) -> None:
        """See `Accelerator.log`; `only` is the name of the one tracker that records."""

    def log_images(
        self,
        values: Mapping[str, Any],
        step: int | None,
        log_kwargs: Mapping[str, Any] | None,
        dataformats: str | None,
        *,
        only: str | None = None,
    ) -> None:
        """See `Accelerator.log_images`."""

    def log_table(
        self,
        name: str,
        content: tuple[Sequence[str] | None, Sequence[Sequence[Any]] | None, Any],
        step: int | None,
        log_kwargs: Mapping[str, Any] | None,
        *,
        only: str | None = None,
    ) -> None:
        """See `Accelerator.log_table`; `content` is columns, data and dataframe."""

    def get(self, name: str, unwrap: bool = False) -> Any:
        """See `Accelerator.get_tracker`."""

    def caught_up(self, name: str) -> Any:
        """The tracker itself, when it has recorded what was logged so far; what takes every call where it does not record."""

    def state(self) -> Any:
        """The data of the recorded run for a checkpoint, as JSON."""

    def resume(self, state: Any) -> None:
        """Goes on with the run of a checkpoint, if `state` names one."""

    def finish(self, failed: bool | None = None) -> None:
        """See `Accelerator.end_training`."""

    def details(self) -> dict[str, str]:
        """The status of each tracker, by name, for `explain()`."""


class RecorderFactory(Protocol):
    """The factory of recorders that is found under the name."""

    def __call__(self, chosen: Chosen, rules: TrackingKwargs, world: World, project: ProjectConfiguration) -> Recorder:
        """Makes one.

        Args:
            chosen: the trackers.
            rules: how failures are treated.
            world: the processes.
            project: where local trackers write.
        """
