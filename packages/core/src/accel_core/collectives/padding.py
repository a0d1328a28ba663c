"""Tensors of one size, so that they can be gathered, or split evenly."""

from __future__ import annotations

import cmath
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import torch

from accel_core.base.nested import Tree, flatten_with_shape, map_tensors, unflatten
from accel_core.collectives.reduce_gather import Measured, channel_of, check_tensors, letter_for, refuse

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from accel_core.processes.world import World

T = TypeVar("T")


def pad_across_processes(
    tree: T,
    world: World,
    dim: int = 0,
    pad_index: complex = 0,
    pad_first: bool = False,
    group: ProcessGroup | None = None,
) -> T:
    """Pads to the ranks' largest size: `accel_core.pad_across_processes`. One collective."""
    channel = channel_of(world, group)
    leaves, shape = flatten_with_shape(tree)
    try:
        check_tensors("pad_across_processes", tree, leaves)
        reaching = [leaf for leaf in leaves if _reaches(dim, leaf)]
        for dtype in dict.fromkeys(leaf.dtype for leaf in reaching):
            if not _holds(pad_index, dtype):
                raise ValueError(
                    f"pad_across_processes(pad_index={pad_index}): {str(dtype).removeprefix('torch.')} cannot hold this "
                    f"value. Pass one that every tensor can hold, or pad tensors of different dtypes in calls of their own."
                )
    except (TypeError, ValueError) as error:
        refuse(channel, error)
    if channel is None:
        return tree
    call = f"pad_across_processes(dim={dim}, pad_index={pad_index}, pad_first={bool(pad_first)})"
    letter = letter_for(channel, call, tree, leaves, shape, _Along(dim))
    rows = channel.exchange(letter, [torch.empty(0, dtype=torch.uint8)] * len(reaching))
    largest = iter([max(map(len, by_rank)) for by_rank in rows])
    return unflatten(
        tree,
        [_padded(leaf, next(largest), dim, pad_index, pad_first) if _reaches(dim, leaf) else leaf for leaf in leaves],
    )


def pad_input_tensors(tree: Tree, batch_size: int, num_processes: int, dim: int = 0) -> Tree:
    """Repeats a batch's last row until `num_processes` can share it evenly. No collective.

    `batch_size` is how many rows the batch has, in `dim`: tensors of another size there, and other
    leaves, stay. Returns the same structure, or `tree` itself if nothing is missing. `ValueError`
    if no tensor has `batch_size` rows.
    """
    missing = -batch_size % num_processes
    shapes = []
    full = 0

    def filled(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal full
        shapes.append(list(tensor.shape))
        if not (_reaches(dim, tensor) and tensor.shape[dim] == batch_size):
            return tensor
        full += 1
        return torch.cat([tensor, *[tensor.narrow(dim, batch_size - 1, 1)] * missing], dim) if missing else tensor

    padded = map_tensors(filled, tree)
    if not full:
        raise ValueError(
            f"pad_input_tensors(batch_size={batch_size}, dim={dim}): no tensor has that many rows; the shapes are {shapes}. "
            f"Pass the size that the batch has in this dimension."
        )
    return padded if missing else tree


@dataclass(frozen=True)
class _Along:
    """Measures a leaf by its size along one dimension, for the header; no values are sent."""

    dim: int

    def __call__(self, leaf: torch.Tensor) -> Measured:
        sizes: list[int | str] = ["*"] * leaf.ndim
        if not _reaches(self.dim, leaf):
            return None, 0, sizes
        return (torch.uint8, (0,)), leaf.shape[self.dim], sizes


def _reaches(dim: int, leaf: torch.Tensor) -> bool:
    return -leaf.ndim <= dim < leaf.ndim


def _padded(leaf: torch.Tensor, largest: int, dim: int, pad_index: complex, pad_first: bool) -> torch.Tensor:
    size = leaf.shape[dim]
    if size == largest:
        return leaf
    shape = list(leaf.shape)
    shape[dim] = largest
    padded = leaf.new_full(shape, pad_index)
    padded.narrow(dim, largest - size if pad_first else 0, size).copy_(leaf)
    return padded


def _holds(value: complex, dtype: torch.dtype) -> bool:
    """Whether a tensor of the dtype holds the value, up to rounding; torch alters some silently."""
    try:
        kept = torch.full((), value, dtype=dtype).item()
    except (RuntimeError, OverflowError):
        return False
    if not (dtype.is_floating_point or dtype.is_complex):
        return kept == value
    if cmath.isnan(value) or cmath.isinf(value):
        return cmath.isnan(kept) == cmath.isnan(value) and cmath.isinf(kept) == cmath.isinf(value)
    return abs(value) <= torch.finfo(dtype).max
