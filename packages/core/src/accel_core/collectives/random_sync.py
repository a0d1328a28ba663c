"""Random streams that all ranks are to share, made equal to those of rank 0."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from accel_core.collectives.broadcast import broadcast_from
from accel_core.collectives.reduce_gather import channel_of

if TYPE_CHECKING:
    from accel_core.processes.world import World


def synchronize_random_states(rng_types: Sequence[str], generators: Sequence[torch.Generator], world: World) -> None:
    """Sets streams to their states on rank 0. One collective; none for one rank or no streams."""
    channel = channel_of(world, None)
    if channel is None:
        return
    states: dict[str, list[torch.Tensor]] = {}
    setters: list[Callable[[torch.Tensor], object]] = []
    found: list[tuple[torch.Tensor, Callable[[torch.Tensor], object]]]
    for kind in dict.fromkeys(rng_types):
        if kind == "generator":
            found = [(generator.get_state(), generator.set_state) for generator in generators]
        elif kind == "torch":
            found = [(torch.get_rng_state(), torch.set_rng_state)]
        elif kind == world.device.type:
            module, device = torch.get_device_module(kind), world.device
            found = [(module.get_rng_state(device), lambda state: module.set_rng_state(state, device))]  # noqa: B023
        else:
            found = []
            warnings.warn(
                f"rng_types has {kind!r}, but this run trains on {str(world.device)!r}: it has no effect here. Leave it out.",
                stacklevel=2,
            )
        if found:
            states[kind] = [state for state, _ in found]
            setters += [setter for _, setter in found]
    if states:
        received = broadcast_from(channel, "synchronize_rng_states", states, 0)
        if channel.rank:
            for setter, state in zip(setters, [each for same in received.values() for each in same], strict=True):
                setter(state)
