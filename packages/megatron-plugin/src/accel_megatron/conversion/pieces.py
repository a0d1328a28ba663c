"""Which part of which tensor of transformers a parameter of Megatron-core on this rank is.

The arithmetic of the rows of a table: shapes and boxes alone, no model and no process group.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from accel_core.api.layouts import Box, Piece

if TYPE_CHECKING:
    from accel_megatron.conversion.table import Row


@dataclass(frozen=True)
class Sizes:
    """Of a model: heads, query groups, elements of a head, entries of the vocabulary, experts."""

    heads: int
    groups: int
    head: int
    vocabulary: int
    experts: int


class Part(NamedTuple):
    """Of a tensor-parallel group: the number of this rank in it, and how many there are."""

    rank: int
    size: int


class Source(NamedTuple):
    """A tensor of transformers: its shape, and the pieces of it on this rank, views of a parameter."""

    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]


class _Segment(NamedTuple):
    """Rows of a parameter: `length` of them from `here` on are those of the `block` from `start` on."""

    block: int
    start: int
    here: int
    length: int


def sources_of(row: Row, tensor: torch.Tensor, part: Part, sizes: Sizes, expert: int | None = None) -> list[Source]:
    """The tensors of transformers that a parameter, or a part of it on this rank, is made of.

    In the order of `row.sources`. `expert` is the number in the whole model, for a stacked row.
    """
    axis = row.split or 0
    blocks, segments = _layout(row, tensor.shape[axis], part, sizes)
    shapes, placed = _merged(blocks, len(row.sources))
    pieces: list[list[Piece]] = [[] for _ in row.sources]
    for segment in segments:
        source, offset = placed[segment.block]
        data = tensor.detach().narrow(axis, segment.here, segment.length)
        offsets = [offset + segment.start if dim == axis else 0 for dim in range(data.dim())]
        pieces[source].append(_piece(row, offsets, data, expert))
    found = []
    for length, mine in zip(shapes, pieces, strict=True):
        shape = [length if dim == axis else size for dim, size in enumerate(tensor.shape)]
        found.append(Source(_turned(row, shape, [sizes.experts]), tuple(mine)))
    return found


def padding_of(tensor: torch.Tensor, part: Part, vocabulary: int) -> torch.Tensor:
    """The rows of a padded parameter that stand for no entry of the vocabulary; perhaps none."""
    return tensor[min(max(vocabulary - part.rank * tensor.shape[0], 0), tensor.shape[0]) :]


def _layout(row: Row, length: int, part: Part, sizes: Sizes) -> tuple[list[int], list[_Segment]]:
    """The lengths of the blocks of the whole tensor, and what this rank has of them."""
    if row.combine == "qkv":
        return _interleaved(length, part, sizes)
    if row.combine == "gate_up":
        half = length // 2
        return [half * part.size] * 2, [_Segment(each, half * part.rank, half * each, half) for each in range(2)]
    if row.split is None:
        return [length], [_Segment(0, 0, 0, length)]
    whole, start = length * part.size, length * part.rank
    if row.padded:
        whole = sizes.vocabulary
    kept = min(length, whole - start)
    return [whole], [_Segment(0, start, 0, kept)] if kept > 0 else []


def _interleaved(length: int, part: Part, sizes: Sizes) -> tuple[list[int], list[_Segment]]:
    """Of all query groups in turn: their queries, their key, their value; a rank has a range of that."""
    per_group = sizes.heads // sizes.groups
    heads = [per_group, 1, 1]
    first, last = length * part.rank, length * (part.rank + 1)
    segments, at = [], 0
    for group in range(sizes.groups):
        for block, count in enumerate(heads):
            width = count * sizes.head
            begin, end = max(at, first), min(at + width, last)
            if begin < end:
                segments.append(_Segment(block, group * width + begin - at, begin - first, end - begin))
            at += width
    assert at == length * part.size, "heads and groups are those of the model"
    return [count * sizes.head * sizes.groups for count in heads], segments


def _merged(blocks: Sequence[int], count: int) -> tuple[list[int], list[tuple[int, int]]]:
    """The lengths of `count` tensors that hold the blocks; for each block, which one, and where in it."""
    if count == len(blocks):
        return [*blocks], [(number, 0) for number in range(count)]
    assert count == 1, "one tensor for each block, or one for all"
    return [sum(blocks)], [(0, sum(blocks[:number])) for number in range(len(blocks))]


def _piece(row: Row, offsets: Sequence[int], data: torch.Tensor, expert: int | None) -> Piece:
    if row.transposed:
        data = data.t()
    if row.is_stacked:
        assert expert is not None, "the number of the expert is known"
        data = data.unsqueeze(0)
    return Piece(Box(_turned(row, offsets, [expert or 0]), tuple(data.shape)), data)


def _turned(row: Row, numbers: Sequence[int], first: list[int]) -> tuple[int, ...]:
    """One number per dimension as transformers has them."""
    turned = reversed(numbers) if row.transposed else numbers
    return (*(first if row.is_stacked else ()), *turned)


def padded_vocabulary(vocabulary: int, tensor_parallel: int) -> int:
    """The entries of the vocabulary with as many unused ones behind it as make it divisible."""
    return math.ceil(vocabulary / tensor_parallel) * tensor_parallel


def expanded(pattern: str, layers: int, experts: int) -> Iterator[str]:
    """The names for which a pattern stands, in a model of so many layers and experts."""
    for layer in range(layers if "{layer}" in pattern else 1):
        for expert in range(experts if "{expert}" in pattern else 1):
            yield pattern.format(layer=layer, expert=expert)
