"""An observer in a distribution of its own: how long each rank of a run took."""

from __future__ import annotations

import json
import logging
import os
import time

from accel_core import Layout, World, hookimpl

__all__ = ["Stopwatch"]

logger = logging.getLogger(__name__)


class Stopwatch:
    """Measures from the constructor of the Accelerator to `end_training`, and reports once per rank.

    Args:
        path: a file to which every rank appends one line of JSON: its rank, the world size, which shard of how many it
            read, and the wall time in seconds. None: the same goes to the log.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        self._path = path
        self._who: dict[str, int] = {}
        self._began = 0.0

    @hookimpl
    def start(self, world: World, layout: Layout) -> None:
        """Notes who this is, and when it began."""
        shard = layout.shard
        self._who = {"rank": world.rank, "world_size": world.size, "shard": shard.index, "shards": shard.count}
        self._began = time.perf_counter()

    @hookimpl
    def finish(self) -> None:
        """Reports."""
        line = json.dumps({**self._who, "seconds": time.perf_counter() - self._began})
        if self._path is None:
            logger.info("%s", line)
            return
        with open(self._path, "a", encoding="utf-8") as file:
            file.write(line + "\n")  # one write of one short line: lines of several ranks do not mix
