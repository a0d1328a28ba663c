"""Random streams that all ranks are to share, made equal to those of rank 0."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import partial
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
    streams: dict[str, list[tuple[Callable[[], torch.Tensor], Callable[[torch.Tensor], object]]]] = {
        "generator": [(each.get_state, each.set_state) for each in generators],
        "torch": [(torch.get_rng_state, torch.set_rng_state)],
    }
    if (device := world.device).type in rng_types:
        module = torch.get_device_module(device)
        get = partial(module.get_rng_state, device)
        streams[device.type] = [(get, lambda state: module.set_rng_state(state, device))]
    for kind in set(rng_types) - streams.keys():
        warnings.warn(
            f"rng_types has {kind!r}, but this run trains on {str(device)!r}: it has no effect here. Leave it out.",
            stacklevel=2,
        )
    states = {kind: [get() for get, _ in streams[kind]] for kind in rng_types if streams.get(kind)}
    if states:
        received = broadcast_from(channel, "synchronize_rng_states", states, 0)
        for kind in received if channel.rank else ():
            for (_, put), state in zip(streams[kind], received[kind], strict=True):
                put(state)
