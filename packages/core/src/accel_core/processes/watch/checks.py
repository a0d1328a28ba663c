"""Comparison of collectives over ranks, in the store, before they run: ACCELERATE_DEBUG_MODE=1."""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from accel_core.base.deprecation import level_of_the_user
from accel_core.base.errors import CollectiveMismatchError
from accel_core.processes.mismatch_report import Description, describe, mismatch
from accel_core.processes.watch.stack_location import calling_line

if TYPE_CHECKING:
    from torch.distributed import Store


class Checks:
    """One rank's checks, over its own connection to the store. `verdict`: why ranks cannot meet."""

    def __init__(self, store: Store, rank: int, size: int, verdict: Callable[[], str]) -> None:
        self._store, self._verdict = store, verdict
        self._rank, self._everyone = rank, tuple(range(size))
        self._counts: dict[tuple[int, ...], int] = {}
        self._warned: set[tuple[str, ...]] = set()

    def compare(self, name: str, members: tuple[int, ...] | None, details: Description | None) -> None:
        """Waits for the members (None: all); raises on all if calls differ. Collective."""
        members = members or self._everyone
        heard = self._heard(members, {**(details or describe(name)), "line": calling_line()})
        if any({**each, "line": ""} != {**heard[0], "line": ""} for each in heard):
            raise mismatch(heard)
        lines = tuple(each["line"] for each in heard)
        if len(set(lines)) > 1 and lines not in self._warned:
            self._warned.add(lines)
            table = "\n".join(f"  rank {rank}: {line}" for rank, line in zip(members, lines, strict=True))
            warnings.warn(
                f"The ranks called {name} at different lines, which fit together by chance or on purpose:\n{table}",
                stacklevel=level_of_the_user(),
            )

    def _heard(self, members: tuple[int, ...], said: Description) -> list[dict[str, Any]]:
        """The description of the call that each member is about to make, in rank order."""
        number = self._counts[members] = self._counts.get(members, 0) + 1
        group = ",".join(map(str, members))
        keys = [f"{group}/{number}/{rank}" for rank in members]
        self._store.set(f"{group}/{number}/{self._rank}", json.dumps(said))
        pause = 0.0005
        while not self._store.check(keys):
            if self._verdict():
                raise CollectiveMismatchError(self._verdict())
            time.sleep(pause)
            pause = min(2 * pause, 0.1)
        heard = [json.loads(self._store.get(key)) for key in keys]
        if number > 1:
            self._store.delete_key(f"{group}/{number - 1}/{self._rank}")  # all have read it: they are here
        return heard
