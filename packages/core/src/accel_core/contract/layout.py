"""The part of the data that a process reads. Peers of a tensor- or pipeline-parallel group read the same one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from accel_core.processes.world import World


@dataclass(frozen=True)
class Shard:
    """The `index`-th of `count` equal parts of the data: the data-parallel coordinate of this process."""

    index: int
    count: int

    def __post_init__(self) -> None:
        if self.count < 1 or not 0 <= self.index < self.count:
            raise ValueError(
                f"Shard(index={self.index}, count={self.count}) names no part of the data: expected 0 <= index < count. "
                f"Type Shard(world.rank, world.size) for one part per process, or Shard(0, 1) for all of the data."
            )


@dataclass(frozen=True)
class Layout:
    """The position of a process in the data-parallel arrangement.

    Args:
        shard: the part of the data that this process reads.
        data_group: the ranks over which a global batch is spread, in shard order. None: all.
        mesh: the device mesh of the strategy, if it has one.
        gradient_group: the ranks over which a gradient is the mean, if more than `data_group`, such
            as peers that compute parts of one long sequence. None: `data_group`.
    """

    shard: Shard
    data_group: ProcessGroup | None = None
    mesh: Any = None
    gradient_group: ProcessGroup | None = None

    @classmethod
    def data_parallel(cls, world: World) -> Layout:
        """Every rank reads its own part."""
        return cls(Shard(world.rank, world.size))
