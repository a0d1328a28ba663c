"""A vote on each attempt of `find_executable_batch_size`: all ranks had room, or all try a smaller batch.

The vote goes through the store at which the ranks have met and not through the process group, where
the others may be waiting in a collective of the attempt: a second collective would be taken for
that one.

Ranks that run out at the same place go on together. A rank that runs out alone, between two
collectives, leaves the others inside one that nobody can take back. So the vote compares how many
collectives each rank has begun, and one whose peers do not come waits for its patience only. Both
end in an error that says so, instead of a hang or of sums of things that do not belong together.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from accel_core.base.errors import CollectiveMismatchError
from accel_core.processes.watch.collective_scope import collective
from accel_core.processes.world import groups_beside

_DONE, _NO_ROOM = "done", "ran out of memory"


@dataclass(frozen=True)
class Vote:
    """The outcome of an attempt on one rank, and how many collectives it has begun."""

    function: str
    size: int
    outcome: str
    begun: int


class Ballot:
    """The votes of all ranks about one attempt."""

    def __init__(self, group: dist.ProcessGroup, store: dist.Store) -> None:
        self._group, self._rank, self._size = group, group.rank(), group.size()
        self._store = dist.PrefixStore("accel/attempts", store)
        self._round = self._store.add(f"votes/{self._rank}", 1)

    @classmethod
    def running(cls) -> Ballot | None:
        """That of torch's default group; None if there is nobody else to ask."""
        group = dist.group.WORLD if dist.is_initialized() else None
        store = None if group is None or group.size() == 1 else distributed_c10d._get_default_store()
        return None if group is None or store is None else cls(group, store)

    def cast(self, function: str, size: int, outcome: str) -> None:
        """Says what became of the attempt on this rank."""
        vote = Vote(function, size, outcome, _collectives_begun(self._group))
        self._store.set(self._key(self._rank), json.dumps(asdict(vote)))

    def read(self, patience: timedelta | None) -> list[Vote]:
        """The votes in rank order. Waits for them, without `patience` as long as the store does by itself."""
        keys = [self._key(rank) for rank in range(self._size)]
        self._store.wait(keys, *([] if patience is None else [patience]))
        return [Vote(**json.loads(self._store.get(key))) for key in keys]

    def missing(self) -> list[int]:
        """The ranks that have not voted."""
        return [rank for rank in range(self._size) if not self._store.check([self._key(rank)])]

    def _key(self, rank: int) -> str:
        return f"vote/{self._round}/{rank}"


def _collectives_begun(group: dist.ProcessGroup) -> int:
    groups = [group, *groups_beside(group)]
    backends: list[Any] = [each._get_backend(device) for each in groups for device in each._device_types]
    return sum(backend._get_sequence_number_for_group() for backend in dict.fromkeys(backends))


def cast_error(function: str, size: int, outcome: str) -> None:
    """Tells the other ranks of an error that is about to leave the function. The error matters more than the store."""
    with contextlib.suppress(dist.DistError):
        ballot = Ballot.running()
        if ballot is not None:
            ballot.cast(function, size, outcome)


def all_done(function: str, size: int, problem: str | None, patience: timedelta) -> bool:
    """Whether an attempt has ended well on all ranks, or else can be repeated by all. Raises where neither holds."""
    ballot = Ballot.running()
    if ballot is None:
        return problem is None
    ballot.cast(function, size, _DONE if problem is None else _NO_ROOM)
    votes: list[Vote] | None = None
    with contextlib.suppress(dist.DistStoreError), collective("find_executable_batch_size()"):
        votes = ballot.read(None if problem is None else patience)
    if votes is None:  # outside of the handler: behind an error of a store, this one would pass for another rank's
        outcome = "gave up waiting for the other ranks"
        ballot.cast(function, size, outcome if problem is None else f"{_NO_ROOM}, and {outcome}")
        raise RuntimeError(
            f"`{function}` was tried with a batch size of {size}, and {problem or 'there was room on this rank'}; but ranks "
            f"{ballot.missing()} have not ended the attempt. A rank that runs out of memory alone leaves the others in a "
            f"collective, which cannot be taken back. Start again with a smaller starting_batch_size; if the attempt just "
            f"takes long on the others, give a larger patience."
        )
    _check(votes)
    return all(vote.outcome == _DONE for vote in votes)


def _check(votes: list[Vote]) -> None:
    table = "\n".join(
        f"  rank {rank}: `{vote.function}` with a batch size of {vote.size} {vote.outcome}, after {vote.begun} "
        f"collectives"
        for rank, vote in enumerate(votes)
    )
    if any(vote.outcome not in (_DONE, _NO_ROOM) for vote in votes):
        raise RuntimeError(
            f"An attempt of find_executable_batch_size failed, and not for lack of memory:\n{table}\nMend the error of that "
            f"rank; the others only follow it."
        )
    if len({(vote.function, vote.size) for vote in votes}) > 1:
        raise CollectiveMismatchError(
            f"The ranks are in different attempts of find_executable_batch_size:\n{table}\nCall the decorated function on all "
            f"ranks, with the same starting_batch_size and reduce_batch_size_fn, and make the Accelerator before."
        )
    if len({vote.begun for vote in votes}) > 1 and any(vote.outcome == _NO_ROOM for vote in votes):
        raise RuntimeError(
            f"Memory ran out between two collectives, so the next one of a rank would be taken for another one:\n{table}\n"
            f"Start again with a smaller starting_batch_size."
        )
