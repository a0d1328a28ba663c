"""What a manifest says of the run that saved a checkpoint: for people, and for messages.

Nothing of the training is restored from it. Trackers go on with the run that it names.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from accel_core.accumulation import Accumulation
    from accel_core.plugins.explain import Explanation
    from accel_core.prepare import Prepared
    from accel_core.world import World


def set_up(world: World, explanation: Explanation) -> dict[str, Any]:
    """What stays as it is in a run: the world, versions, every option and component with its source. As JSON."""
    explained = explanation.as_dict()
    return {
        "accel-core": version("accel-core"),
        "torch": torch.__version__,
        "world": {"size": world.size, "source": world.source, "device": world.device.type},
        "components": explained["parts"],
        "options": explained["settings"],
    }


def whereabouts(prepared: Prepared, accumulation: Accumulation) -> dict[str, Any]:
    """Where a run stands, as JSON."""
    return {
        "backwards": accumulation.total_backwards,
        "window": {"open": accumulation.open, "position": accumulation.position, "steps": accumulation.steps},
        "positions": [_position(loader) for loader in prepared.loaders],
    }


def _position(loader: Any) -> dict[str, int] | None:
    """Epoch and samples, of a loader that says them."""
    state = loader.state_dict() if callable(getattr(loader, "state_dict", None)) else {}
    names = ("seed", "epoch", "samples")
    return {name: state[name] for name in names} if all(type(state.get(name)) is int for name in names) else None
