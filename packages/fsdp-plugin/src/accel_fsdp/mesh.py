"""The arrangement of a run's processes: replicas × shards × context peers × tensor peers.

Tensor peers are neighbours by rank, because they talk in every layer; then come context peers, then
shards, and replicas are furthest apart. Parameters are sharded over context peers too: these hold
the same weights for other parts of a sequence, so to the gradients they are one more dimension of
data parallelism.

Every process group is made by `World.subgroup`, with the world's timeout and backend; torch's own
way to a mesh, `init_device_mesh`, drops the timeout.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh

from accel_core import Layout, Shard

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from accel_core import World

REPLICATE, SHARD, CONTEXT, TENSOR = range(4)


class Sizes(NamedTuple):
    """The number of processes along each dimension; their product is the size of the world."""

    replicate: int
    shard: int
    context: int
    tensor: int

    @classmethod
    def of(cls, processes: int, replicate: int, context: int, tensor: int, shard: int | None = None) -> Sizes:
        """The sizes for so many processes: shards take what the named dimensions leave over.

        Raises:
            ValueError: if the product of the named dimensions does not divide the number of
                processes; or is not that number, with `shard` among them.
        """
        named = replicate * context * tensor
        if shard is not None and named * shard != processes:
            raise ValueError(
                f"replicate({replicate}) * shard({shard}) * context_parallel({context}) * tensor_parallel({tensor}) = {named * shard} != "
                f"{processes}, the number of processes of this run. Start {named * shard} processes, or leave FSDP(shard=...) out: the "
                f"number of shards then is what the others leave over."
            )
        if min(replicate, context, tensor) < 1 or processes % named:
            fitting = ", ".join(str(count) for count in range(1, processes + 1) if processes % count == 0)
            raise ValueError(
                f"replicate({replicate}) * context_parallel({context}) * tensor_parallel({tensor}) = {named} does not divide "
                f"the {processes} process{'es' if processes > 1 else ''} of this run, and what is left over is the number of "
                f"shards. Give FSDP numbers whose product is one of {fitting}; or start another number of processes."
            )
        return cls(replicate, processes // named, context, tensor)


@dataclass(frozen=True)
class Meshes:
    """The device meshes of one strategy, and this process's place in them. Made by `Meshes.build`.

    Args:
        sizes: of the four dimensions.
        root: the mesh of which `fsdp` and `tensor` are slices, as torch wants it to shard what is
            split already.
        fsdp: what `fully_shard` takes: over all shards and context peers; with replicas, 2-D,
            (replicate, shard).
        tensor: the peers that hold parts of one layer; None without tensor parallelism.
        context: the peers that hold parts of one sequence; None without context parallelism.
        data: which part of the data this process reads: tensor and context peers read the same.
        data_group: the ranks over which a global batch is spread, with this process's tensor and
            context coordinate.
        gradient_group: the ranks over which a gradient is the mean, where there are context peers;
            else None.
    """

    sizes: Sizes
    root: DeviceMesh
    fsdp: DeviceMesh
    tensor: DeviceMesh | None
    context: DeviceMesh | None
    data: Shard
    data_group: ProcessGroup
    gradient_group: ProcessGroup | None

    @classmethod
    def build(
        cls, world: World, replicate: int = 1, context: int = 1, tensor: int = 1, shard: int | None = None
    ) -> Meshes:
        """Arranges the processes of `world`. Collective, with the same numbers on all ranks.

        Args:
            world: whose ranks these are. In a world of one that has no group yet, one is started,
                with this process alone.
            replicate: how many copies of the sharded parameters there are.
            context: how many processes share a sequence.
            tensor: how many processes share a layer.
            shard: how many processes share a copy of the parameters; None: those that the others
                leave over.

        Raises:
            ValueError: if the numbers do not fit the number of processes.
        """
        sizes = Sizes.of(world.size, replicate, context, tensor, shard)
        ranks = torch.arange(world.size).view(sizes)
        root = _root(world, ranks.flatten(SHARD, CONTEXT))  # of the parameters, context peers are shards
        peers = _mine(world, ranks.movedim(CONTEXT, -1)) if context > 1 else None
        averaging = ranks.movedim(TENSOR, 0).flatten(1)
        index = _coordinate(ranks, world.rank, REPLICATE) * sizes.shard + _coordinate(ranks, world.rank, SHARD)
        return cls(
            sizes,
            root,
            fsdp=root["replicate", "shard"] if replicate > 1 else root["shard"],
            tensor=root["tensor"] if tensor > 1 else None,
            context=None if peers is None else _line(peers, world.device.type, "context"),
            data=Shard(index, replicate * sizes.shard),
            data_group=_mine(world, ranks.permute(CONTEXT, TENSOR, REPLICATE, SHARD).flatten(2)),
            gradient_group=None if peers is None else _mine(world, averaging),
        )

    def layout(self) -> Layout:
        """The layout for the core: this rank's data, and the ranks that average gradients."""
        whole = self.data.count == self.root.size()
        return Layout(self.data, None if whole else self.data_group, self.root, self.gradient_group)

    def describe(self) -> str:
        """The arrangement in words: "replicate 2 × shard 2 × tensor 2 = 8 processes"."""
        named = [f"{name} {size}" for name, size in self.sizes._asdict().items() if size > 1 or name == "shard"]
        total = self.root.size()
        return f"{' × '.join(named)} = {total} process{'es' if total > 1 else ''}"


def _root(world: World, grid: torch.Tensor) -> DeviceMesh:
    """The mesh over replicas, shards and tensor peers; sizes of one only for the shards."""
    names = ("replicate", "shard", "tensor")
    wanted = [(name, dim) for dim, name in enumerate(names) if name == "shard" or grid.shape[dim] > 1]
    return DeviceMesh.from_group(
        [_mine(world, grid.movedim(dim, -1)) for _, dim in wanted],
        world.device.type,
        mesh=grid.view([grid.shape[dim] for _, dim in wanted]),
        mesh_dim_names=tuple(name for name, _ in wanted),
    )


def _line(group: ProcessGroup, device_type: str, name: str) -> DeviceMesh:
    return DeviceMesh.from_group(group, device_type, mesh_dim_names=(name,))


def _coordinate(ranks: torch.Tensor, rank: int, dim: int) -> int:
    return int((ranks == rank).nonzero()[0, dim])


def _mine(world: World, lines: torch.Tensor) -> ProcessGroup:
    """This rank's group along the last dimension of `ranks`. All ranks make all groups."""
    mine = None
    for members in lines.reshape(-1, lines.shape[-1]).tolist():
        group = world.subgroup(members)
        mine = group if world.rank in members else mine
    assert mine is not None, "the lines cover all ranks"
    return mine
