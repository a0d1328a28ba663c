"""The settings that the loader component shows, and the loader that is being iterated."""

from __future__ import annotations

from typing import TYPE_CHECKING

from accel_core.contract.loader_progress import RunningLoader
from accel_core.facade.accelerator_parts import AcceleratorParts
from accel_core.options.resolution import flag

if TYPE_CHECKING:
    from accel_core.options.handlers import KwargsHandler


class LoaderSettings(AcceleratorParts):
    """Properties that are about loaders."""

    @property
    def dataloader_config(self) -> KwargsHandler | None:
        """The options of the loader component as they were given; None if they were not given as one object."""
        return self._dataloader_config

    @property
    def split_batches(self) -> bool | None:
        """Whether a loader's batch size is that of the whole world; None if the loader component does not say."""
        return getattr(self._parts.loader, "split_batches", None)

    @property
    def dispatch_batches(self) -> bool | None:
        """Whether one rank reads a loader for all; None: the kind of dataset decides, or the loader component does not say."""
        return getattr(self._parts.loader, "dispatch_batches", None)

    @property
    def even_batches(self) -> bool | None:
        """Whether an incomplete last global batch is filled; None if the loader component does not say.

        It may be assigned between two windows, and holds for loaders that are prepared afterwards.
        """
        return getattr(self._parts.loader, "even_batches", None)

    @even_batches.setter
    def even_batches(self, even: bool) -> None:
        value = flag("even_batches", even, "", None).value
        self._accumulation.refuse_in_window("even_batches", even)
        if self.even_batches is None:
            raise AttributeError(
                "accelerator.even_batches was assigned, but the loader component has no such option. Install accel-data, whose "
                "loaders have it."
            )
        self._parts.loader.even_batches = value  # type: ignore[attr-defined]

    @property
    def use_seedable_sampler(self) -> bool | None:
        """Whether loaders shuffle by `torch.randperm`, seeded by epoch; None if the loader component does not say."""
        return getattr(self._parts.loader, "use_seedable_sampler", None)

    @property
    def non_blocking(self) -> bool | None:
        """Whether the host goes on while batches are copied to the device; None if the loader component does not say."""
        return getattr(self._parts.loader, "non_blocking", None)

    @property
    def rng_types(self) -> list[str] | None:
        """The random streams that ranks share whenever a loader is iterated; None if the loader component does not say."""
        shared = getattr(self._parts.loader, "rng_types", None)
        return None if shared is None else list(shared)

    @property
    def running_loader(self) -> RunningLoader | None:
        """The prepared loader that is being iterated, the innermost one, and its present batch; None outside of such loops."""
        passage = self._feed.newest()
        if passage is None:
            return None
        loaders = self._prepared.loaders
        loader = next((each for each in loaders if getattr(each, "_accel_outlet", None) is passage.by), None)
        return RunningLoader(loader, passage.remaining, passage.rows)
