"""A flag that any rank can raise and all ranks see."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from accel_core.collectives.reduce_gather import channel_of
from accel_core.processes.channel import Letter
from accel_core.processes.mismatch_report import describe

if TYPE_CHECKING:
    from accel_core.processes.world import World


class Trigger:
    """Lets one rank tell all that something happened there: that a loss is NaN, say, and all had better stop.

    Args:
        world: the processes that share it.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._sets = 0
        self._seen = 0  # how many of them all ranks know of

    def set(self) -> None:
        """Sets the trigger on this rank; all see it at their next `check`. No collective; a signal handler may call it."""
        self._sets += 1

    def check(self) -> bool:
        """Whether any rank has set it since the last time that this was true. A collective, except in a world of one.

        True resets the trigger on every rank.
        """
        sets = self._sets
        found = anywhere(self._world, "check_trigger", sets > self._seen)
        if found:
            self._seen = sets  # a `set` that came after the flag had left is for the next call
        return found


def anywhere(world: World, call: str, here: bool) -> bool:
    """Whether a flag is set on any rank. A collective, except in a world of one.

    Args:
        world: the processes that are asked.
        call: the method that asks, without parentheses, by which ranks in different calls are told.
        here: the flag of this rank.
    """
    channel = channel_of(world, None)
    if channel is None:
        return here
    letter = channel.letters.get(call)
    if letter is None:
        letter = Letter(describe(call), [(torch.bool, ())], [1], channel.device, stacked=True)
        channel.letters[call] = letter
    ((flags,),) = channel.exchange(letter, [torch.tensor(here)])
    return bool(flags.any())
