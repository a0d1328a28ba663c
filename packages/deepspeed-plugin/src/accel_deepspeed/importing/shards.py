"""Shards of ZeRO: which range of which parameter lies where in the flat tensors of a rank."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from accel_checkpoint import flat_range, pieces_of
from accel_core import CheckpointError
from accel_core.api.layouts import Elementwise

Shape = tuple[int, ...]


class Shard(NamedTuple):
    """A range of a parameter.

    Args:
        name: of the parameter.
        group: the number of the flat tensor that it is in.
        start: of the range in the flat tensor of the rank.
        offset, numel: of the range in the parameter.
    """

    name: str
    group: int
    start: int
    offset: int
    numel: int


def shards_of_slices(mappings: Sequence[Any], shapes: Mapping[str, Shape]) -> list[list[Shard]]:
    """Shards per rank in stages 1 and 2: a group's flat tensor is cut into one part per rank.

    Args:
        mappings: of each rank, "param_slice_mappings".
        shapes: of all trained parameters.

    Raises:
        CheckpointError: if ranges do not make up the parameters.
    """
    done = dict.fromkeys(shapes, 0)
    found: list[list[Shard]] = []
    for rank, groups in enumerate(mappings):
        found.append([])
        for group, slices in enumerate(groups):
            for name, address in slices.items():
                numel, start = address.member("numel"), address.member("start")
                found[rank].append(Shard(name, group, start, done[name], numel))
                done[name] += numel
    wrong = [name for name, shape in shapes.items() if done[name] != math.prod(shape)]
    if wrong:
        raise CheckpointError(
            f"The shards of {len(mappings)} ranks were to be put together, but of {wrong[0]!r} they have {done[wrong[0]]} elements, and "
            f"its shape is {list(shapes[wrong[0]])}: the files are of different checkpoints. Pass a folder with those of one."
        )
    return found


def shards_of_parts(groups: Sequence[Mapping[str, Shape]], ranks: int) -> list[list[Shard]]:
    """Shards per rank in stage 3: each parameter is cut into equal parts, the last ones padded."""
    found = []
    for rank in range(ranks):
        shards = []
        for group, shapes in enumerate(groups):
            start = 0
            for name, shape in shapes.items():
                total = math.prod(shape)
                size = -(-total // ranks)
                offset = min(rank * size, total)
                shards.append(Shard(name, group, start, offset, min(size, total - offset)))
                start += size
        found.append(shards)
    return found


def elementwise(shape: Shape, flat: torch.Tensor, shard: Shard) -> Elementwise:
    """The entry of a range of a tensor, which lies in a flat one.

    Raises:
        CheckpointError: if it does not lie there.
    """
    local = flat[shard.start : shard.start + shard.numel]
    if flat.dim() != 1 or local.numel() != shard.numel:
        raise CheckpointError(
            f"{shard.numel} elements of {shard.name!r} were to be read from {shard.start} on, but the flat tensor has the shape "
            f"{list(flat.shape)}: it was moved to a disk (offload to nvme), perhaps. Save a checkpoint without that offload."
        )
    boxes = flat_range(shape, shard.offset, shard.offset + shard.numel)
    return Elementwise(shape, flat.dtype, tuple(pieces_of(boxes, local)))


def whole_shards(groups: Sequence[Mapping[str, Shape]]) -> Iterator[Shard]:
    """The shards of a universal checkpoint: each parameter in a tensor of its own."""
    for group, shapes in enumerate(groups):
        for name, shape in shapes.items():
            yield Shard(name, group, 0, 0, math.prod(shape))
