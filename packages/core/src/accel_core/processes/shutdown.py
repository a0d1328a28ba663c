"""The shutdown of a world's ranks, so that none ends the process group while another uses it."""

from __future__ import annotations

import logging
import time
from datetime import timedelta
from typing import TYPE_CHECKING

import torch.distributed as dist

if TYPE_CHECKING:
    from torch.distributed import Store

PATIENCE = timedelta(seconds=5)
"""The time that a rank that ends waits for the others, in all."""

logger = logging.getLogger(__name__)


class Farewell:
    """The parting of one rank, through the store: a collective could fail when somebody has gone already.

    First everyone waits until nobody works in the group. Then rank 0, which may host the store,
    waits until the others need it no more. With no patience it neither waits nor says anything.
    """

    def __init__(self, store: Store, rank: int, size: int, patience: timedelta) -> None:
        self._store, self._rank, self._size = dist.PrefixStore("farewell", store), rank, size
        self._deadline = time.monotonic() + patience.total_seconds()

    @property
    def complete(self) -> bool:
        """Whether there was patience enough for all that was to be said and heard."""
        return time.monotonic() < self._deadline

    def ready(self) -> None:
        """Says that this rank works in the group no more, and waits for the others to say so."""
        self._say("ready", wait=True)

    def gone(self) -> None:
        """Says that this rank has left the group; on rank 0, waits for the others to say so."""
        self._say("gone", wait=self._rank == 0)

    def _say(self, word: str, wait: bool) -> None:
        left = timedelta(seconds=self._deadline - time.monotonic())
        if left <= timedelta(0):
            return  # out of patience, which has been said, or in a hurry
        try:
            self._store.set(f"{word}/{self._rank}", "")
            if wait:
                self._store.wait([f"{word}/{rank}" for rank in range(self._size)], left)
        except dist.DistError as error:
            self._deadline = time.monotonic()
            reason = str(error).partition("\n")[0]
            logger.warning(
                "Rank %d of %d ends without the others, which were not all %s within %g s: %s",
                self._rank, self._size, word, PATIENCE.total_seconds(), reason,
            )  # fmt: skip
