"""The component for `detect_nonfinite=True`, which is found under a default name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, Protocol

if TYPE_CHECKING:
    from torch import nn

    from accel_core.contract.loader_progress import Feed
    from accel_core.contract.strategy import Strategy
    from accel_core.loop.preparation import Prepared
    from accel_core.plugins.relay import Relay
    from accel_core.processes.world import World

GROUP: Final = "accel.diagnostics"
"""The group of entry points."""
NAME: Final = "nonfinite"
"""The default name in it."""


class Detector(Protocol):
    """Watches the models and backwards of one Accelerator, and raises `NonFiniteError` on every rank."""

    def watch(self, model: nn.Module) -> None:
        """Begins to record the forwards of a model that is trained: the user's, inside a wrapper if there is one."""

    def release(self) -> None:
        """Takes the hooks off the models, and forgets what was recorded."""


class DetectorFactory(Protocol):
    """The factory of detectors that is found under the name."""

    def __call__(
        self,
        world: World,
        feed: Feed,
        prepared: Prepared,
        *,
        strategy: Strategy,
        relay: Relay,
        owners: Mapping[str, Any],
    ) -> Detector:
        """Makes one, and puts it around the bound hooks.

        Args:
            world: the processes.
            feed: where the loaders are.
            prepared: whose gradients are looked at.
            strategy: which distributes.
            relay: the bound hooks.
            owners: who owns each hook, by its name; None: the core's default serves.

        Raises:
            ValueError: if it cannot work under this strategy.
        """
