"""Random streams that all ranks are to share, made equal to those of rank 0."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from accel_core.collectives.broadcast import broadcast_from
from accel_core.collectives.reduce_gather import channel_of

if TYPE_CHECKING:
    from accel_core.processes.world import World

States = dict[str, list[torch.Tensor]]


def synchronize_random_states(rng_types: Sequence[str], generators: Sequence[torch.Generator], world: World) -> None:
    """Sets the streams of this process to the states that they have on rank 0. One collective for all of them.

    None in a world of one, or where there is nothing to send. All ranks give the same `rng_types`
    and equally many generators, or all raise `CollectiveMismatchError`.

    Args:
        rng_types: as for `accel_core.synchronize_rng_states`; "generator" stands for `generators`.
        generators: those that the user handed in; they are changed in place.
        world: the processes.
    """
    channel = channel_of(world, None)
    if channel is None:
        return
    states = _states(rng_types, generators, world)
    if states:
        states = broadcast_from(channel, "synchronize_rng_states", states, 0)
        if channel.rank:
            _restore(states, generators, world)


def _states(rng_types: Sequence[str], generators: Sequence[torch.Generator], world: World) -> States:
    states: States = {}
    for kind in rng_types:
        if kind == "generator":
            if generators:
                states[kind] = [generator.get_state() for generator in generators]
        elif kind == "torch":
            states[kind] = [torch.get_rng_state()]
        elif kind == world.device.type:
            states[kind] = [torch.get_device_module(kind).get_rng_state(world.device)]
        else:
            warnings.warn(
                f"rng_types has {kind!r}, but this run trains on {str(world.device)!r}: it has no effect here. Leave it out, "
                f"or name the stream of the device in use.",
                stacklevel=3,
            )
    return states


def _restore(states: States, generators: Sequence[torch.Generator], world: World) -> None:
    for kind, tensors in states.items():
        if kind == "generator":
            for generator, state in zip(generators, tensors, strict=True):
                generator.set_state(state)
        elif kind == "torch":
            torch.set_rng_state(tensors[0])
        else:
            torch.get_device_module(kind).set_rng_state(tensors[0], world.device)
