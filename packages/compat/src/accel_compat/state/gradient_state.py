"""`GradientState`: all its objects are one view of where the loop of the newest Accelerator stands."""

from __future__ import annotations

import weakref
from typing import Any, ClassVar


class GradientState:
    """Whether gradients are synchronised and optimizers step, and how far the loader in iteration is.

    What it says is that of the Accelerator that was made last; without one it holds what is assigned.
    """

    _shared_state: ClassVar[dict[str, Any]] = {}

    def __init__(self, gradient_accumulation_plugin: Any = None) -> None:
        self.__dict__ = self._shared_state
        if not self._shared_state:
            self.plugin_kwargs: dict[str, Any] = {}
            self._sync_gradients = True
            self._accelerator: Any = None
            self._begun: list[weakref.ref[Any]] = []  # loaders of nobody's Accelerator that are iterated
        if gradient_accumulation_plugin is not None:
            self.plugin_kwargs = gradient_accumulation_plugin.to_kwargs()

    @property
    def initialized(self) -> bool:
        """Whether there is a state."""
        return bool(GradientState._shared_state)

    @property
    def num_steps(self) -> int:
        """Micro-batches in a window."""
        accelerator = self._owner()
        return int(
            self.plugin_kwargs.get("num_steps", 1) if accelerator is None else accelerator.gradient_accumulation_steps
        )

    @property
    def adjust_scheduler(self) -> bool:
        """Whether that was asked for; it has no effect."""
        return bool(self.plugin_kwargs.get("adjust_scheduler", False))

    @property
    def sync_with_dataloader(self) -> bool:
        """Whether a window also closes at the end of a loader."""
        return bool(self.plugin_kwargs.get("sync_with_dataloader", True))

    @property
    def sync_gradients(self) -> bool:
        """Whether optimizers step now; a loop that counts its micro-batches itself assigns it."""
        accelerator = self._owner()
        return self._sync_gradients if accelerator is None else accelerator.sync_gradients

    @sync_gradients.setter
    def sync_gradients(self, sync: bool) -> None:
        accelerator = self._owner()
        if accelerator is None:
            self._sync_gradients = sync
        else:
            accelerator.sync_gradients = sync

    def _set_sync_gradients(self, sync_gradients: bool) -> None:
        self.sync_gradients = sync_gradients

    @property
    def active_dataloader(self) -> Any:
        """The innermost loader in iteration; None outside of loops."""
        return self.dataloader_references[-1]

    @property
    def dataloader_references(self) -> list[Any]:
        """None, and the loaders in iteration, the innermost last."""
        begun = [loader for reference in self._begun if (loader := reference()) is not None]
        running = [loader for loader in begun if loader.running is not None]
        return [None, *running]

    @property
    def in_dataloader(self) -> bool:
        """Whether a loader is in iteration."""
        return self.active_dataloader is not None

    @property
    def end_of_dataloader(self) -> bool:
        """Whether the present batch is the last one of the innermost loader."""
        active = self.active_dataloader
        return active is not None and bool(active.end_of_dataloader)

    @property
    def remainder(self) -> int:
        """Samples of an incomplete last global batch, 0 if it is complete; -1 if that is not known."""
        active = self.active_dataloader
        return -1 if active is None else int(active.remainder)

    def __repr__(self) -> str:
        """Where the loop stands, one fact a line."""
        return (
            f"Gradients are synchronised: {self.sync_gradients}\nLast batch of the loader: {self.end_of_dataloader}\n"
            f"Samples of an incomplete last batch: {self.remainder}\nAccumulation: {self.plugin_kwargs}\n"
        )

    def _begin(self, loader: Any) -> None:
        """A loader is iterated: it is the innermost one from now on."""
        self._begun = [each for each in self._begun if each() is not None and each() is not loader]
        self._begun.append(weakref.ref(loader))

    def _serve(self, accelerator: Any) -> None:
        """What this says is of this Accelerator from now on."""
        self._accelerator = weakref.ref(accelerator)

    def _owner(self) -> Any:
        return None if self._accelerator is None else self._accelerator()

    @staticmethod
    def _reset_state() -> None:
        """Forgets the state."""
        GradientState._shared_state.clear()
