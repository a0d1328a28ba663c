"""Batches that end at different steps on different ranks, because their streams differ.

Under the policies "pad" and "stop" the ranks agree, with every batch, on how many are still to
come. The agreement does not stand in the way of the step: each rank holds one batch more than it
has to look ahead, so that what it says about the next batch can leave when this one is handed out,
in an asynchronous collective of one number per rank, and is there when the next one is asked for.
Once the end is in sight, nothing more has to be said.

An error of one rank's dataset travels the same way, so all ranks raise instead of waiting for it.
"""

from __future__ import annotations

import traceback
from collections import deque
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Generic, TypeVar

import torch
import torch.distributed as dist

from accel_core.api.component import all_gather_single, broadcast_object, collective, flatten, gather_objects
from accel_core.api.loader import looked_ahead
from accel_data.batch_scatter import message_device

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from accel_core import World
    from accel_core.api.component import Channel
    from accel_data.configuration import Uneven

T = TypeVar("T")

KEPT_BATCHES = 4
"""So many first batches are kept for filling up; they are repeated in turn."""

_FAILED = -1


def even_ends(
    batches: Iterable[T], policy: Uneven, world: World, group: ProcessGroup | None = None, ahead: int = 1
) -> Iterator[tuple[T, bool, int]]:
    """This rank's batches by the policy, each with whether it is real and how many follow.

    Advancing is a collective of the group, except for "join" and where the group has one rank.
    Ranks that leave the loop early do so at the same batch, and closing the iterator waits for what
    has been sent. RuntimeError is raised if the dataset of another rank raised.

    Args:
        batches: of this rank, asked for `ahead` + 1 batches beyond the one that is handed out.
        policy: "pad": all go on until the last rank has ended; one that ended before repeats its
            first batches, which are not real, or one of another rank if it never had any. "stop":
            all end with the first. "join": each ends by itself, and nothing is agreed.
        ahead: how many batches before the end the number of those that follow is exact, for all
            ranks together, but for each alone under "join"; before, it is `ahead`. At least 1.
    """
    channel = world.channel(group) if world.size > 1 else None
    if policy == "join" or channel is None or channel.size == 1:
        return ((batch, True, following) for batch, following in looked_ahead(batches, ahead))
    return _Ends(batches, ahead).agreed(_Agreement(channel), policy == "pad", world, group)


class _Ends(Generic[T]):
    """One rank's batches, with `ahead` fetched beyond the next one."""

    def __init__(self, batches: Iterable[T], ahead: int) -> None:
        self._batches = iter(batches)
        self._held: deque[T] = deque()
        self._wanted = ahead + 1
        self._first: deque[T] = deque()
        self._ended = False
        self._error: Exception | None = None

    def agreed(
        self, agreement: _Agreement, pads: bool, world: World, group: ProcessGroup | None
    ) -> Iterator[tuple[T, bool, int]]:
        """The batches until the common end."""
        agreement.send(self._fetch())
        try:
            held = self._received(agreement, world, group)
            if pads and 0 in held and any(held):
                self._borrow(held, world, group)
            while (coming := max(held) if pads else min(held)) == self._wanted:
                batch, is_real = self._next(pads)
                agreement.send(self._fetch())
                yield batch, is_real, coming - 1
                held = self._received(agreement, world, group)
            for following in reversed(range(coming)):  # the end is in sight: there is nothing more to agree on
                yield *self._next(pads), following
        finally:
            agreement.close()

    def _received(self, agreement: _Agreement, world: World, group: ProcessGroup | None) -> list[int]:
        held = agreement.receive()
        if _FAILED in held:
            self._raise(world, group)
        return held

    def _fetch(self) -> int:
        """Fetches what is to be held, and says how much that is; or that it failed."""
        missing = 0 if self._ended else self._wanted - len(self._held)
        try:
            for _ in range(missing):
                self._held.append(next(self._batches))
        except StopIteration:
            self._ended = True
        except Exception as error:  # noqa: BLE001  (whatever it is, the other ranks are waiting; it is raised later)
            self._error, self._ended = error, True
        return len(self._held) if self._error is None else _FAILED

    def _next(self, pads: bool) -> tuple[T, bool]:
        if self._held:
            batch = self._held.popleft()
            if pads and len(self._first) < KEPT_BATCHES:
                self._first.append(_renewed(batch))
            return batch, True
        batch = self._first[0]
        self._first.rotate(-1)
        return _renewed(batch), False

    def _borrow(self, held: list[int], world: World, group: ProcessGroup | None) -> None:
        source = next(rank for rank, count in enumerate(held) if count)
        mine = self._held[0] if self._held else None
        borrowed = broadcast_object(mine, world, source, group)
        if not self._held:
            self._first.append(borrowed)

    def _raise(self, world: World, group: ProcessGroup | None) -> None:
        """Raises on all ranks, once all know why."""
        own = self._error
        text = None if own is None else "".join(traceback.format_exception_only(type(own), own)).strip()
        told = gather_objects([text], world, group)
        if own is not None:
            raise own
        errors = "; ".join(f"rank {rank} raised {error}" for rank, error in enumerate(told) if error is not None)
        raise RuntimeError(
            f"This rank asked for its next batch, but the dataset of another rank failed, and so all ranks end: {errors}. Mend "
            f"that one; ranks are counted within the ranks that share the data."
        )


class _Agreement:
    """One number of each rank to all, without waiting: `send`, later `receive`, in one order."""

    def __init__(self, channel: Channel) -> None:
        self._group = channel.group
        device = message_device(channel)
        with torch.inference_mode(False):  # else a buffer born in inference mode could not be written outside of it
            self._sent = torch.zeros(1, dtype=torch.int64, device=device)
            self._received = torch.zeros(channel.size, dtype=torch.int64, device=device)
        self._work: dist.Work | None = None

    def send(self, number: int) -> None:
        """Sets this rank's number on its way."""
        self._sent.fill_(number)
        self._work = all_gather_single(self._received, self._sent, group=self._group, async_op=True)

    def receive(self) -> list[int]:
        """The numbers of all ranks that were sent last."""
        self.close()
        numbers: list[int] = self._received.tolist()
        return numbers

    def close(self) -> None:
        """Waits for what is on its way."""
        work, self._work = self._work, None
        if work is None:
            return
        with collective("the next batch of a stream"):
            work.wait()


def _renewed(batch: T) -> T:
    """The batch in new containers with the same tensors, for a loop may take its own apart."""
    leaves, rebuild = flatten(batch)
    renewed: T = rebuild(leaves)
    return renewed
