"""A flag that any rank can raise and all ranks see."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from accel_core.channel import Letter
from accel_core.collectives import channel_of
from accel_core.mismatch import describe

if TYPE_CHECKING:
    from accel_core.world import World

_CALL = "check_trigger"


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
        found = sets > self._seen
        channel = channel_of(self._world, None)
        if channel is not None:
            letter = channel.letters.get(_CALL)
            if letter is None:
                spec = (torch.bool, ())
                letter = channel.letters[_CALL] = Letter(describe(_CALL), [spec], [1], channel.device, stacked=True)
            ((flags,),) = channel.exchange(letter, [torch.tensor(found)])
            found = bool(flags.any())
        if found:
            self._seen = sets  # a `set` that came after the flag had left is for the next call
        return found
