"""A flag that any rank can raise and all ranks see."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from accel_core.collectives.reduce_gather import channel_of
from accel_core.processes.mismatch_report import describe

if TYPE_CHECKING:
    from accel_core.processes.world import World


class Trigger:
    """Lets one rank tell all that something happened there: that a loss is NaN, say, and all had better stop."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._sets = 0
        self._seen = 0  # how many of them all ranks know of

    def set(self) -> None:
        """Sets the trigger on this rank; all see it at their next `check`. No collective; a signal handler may call it."""
        self._sets += 1

    def check(self) -> bool:
        """Whether any rank has set it since this was last true. A collective, except in a world of one."""
        sets = self._sets
        found = anywhere(self._world, "check_trigger", sets > self._seen)
        if found:
            self._seen = sets  # a `set` that came after the flag had left is for the next call
        return found


def anywhere(world: World, call: str, here: bool) -> bool:
    """Whether a flag is set on any rank, for the method `call`. A collective, except in a world of one."""
    channel = channel_of(world, None)
    if channel is None:
        return here
    letter = channel.letter(call, lambda: describe(call), [(torch.bool, ())], [1], stacked=True)
    ((flags,),) = channel.exchange(letter, [torch.tensor(here)])
    return bool(flags.any())
