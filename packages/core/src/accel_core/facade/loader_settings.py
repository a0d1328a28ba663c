"""The settings that the loader component shows, and the loader that is being iterated."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from accel_core.contract.loader_progress import RunningLoader
from accel_core.facade.accelerator_parts import AcceleratorParts
from accel_core.facade.process_methods import shown
from accel_core.options.resolution import flag

if TYPE_CHECKING:
    from accel_core.options.handlers import KwargsHandler


def _of_loader(name: str, text: str) -> Any:
    """A read-only property: the attribute of the loader component, None where it has none."""
    return property(lambda self: getattr(self._parts.loader, name, None), doc=text)


class LoaderSettings(AcceleratorParts):
    """Properties that are about loaders; of the loader component's settings None where it does not say."""

    dataloader_config: KwargsHandler | None = shown(
        "_dataloader_config", "The loader options that were given as an object."
    )
    split_batches: bool | None = _of_loader(
        "split_batches", "Whether a loader's batch size is that of the whole world."
    )
    dispatch_batches: bool | None = _of_loader("dispatch_batches", "Whether one rank reads a loader for all ranks.")
    use_seedable_sampler: bool | None = _of_loader(
        "use_seedable_sampler", "Whether each epoch has a seed for shuffling."
    )
    non_blocking: bool | None = _of_loader("non_blocking", "Whether the host goes on while batches are copied.")

    @property
    def even_batches(self) -> bool | None:
        """Whether an incomplete last global batch is filled; None: it is not known.

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
    def rng_types(self) -> list[str] | None:
        """The random streams that ranks share whenever a loader is iterated; None: they are not known."""
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
