"""How a strategy lays out parameters and the state that optimizers keep of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from accel_core.api.layouts import Box, Piece


@dataclass(frozen=True)
class Extent:
    """The part of a parameter on this rank: `boxes` of its global `shape`, possibly none."""

    shape: tuple[int, ...]
    boxes: tuple[Box, ...]


def pieces_of(boxes: Sequence[Box], local: torch.Tensor) -> Iterator[Piece]:
    """Cuts a local tensor into views, one per box; it is flat, or has the shape of its one box."""
    if len(boxes) == 1 and local.shape == boxes[0].sizes:
        yield Piece(boxes[0], local)
        return
    start = 0
    for box in boxes:
        yield Piece(box, local[start : start + box.numel].view(box.sizes))
        start += box.numel


class Sharding(Protocol):
    """A strategy's layout of parameters and optimizer state. Here: whole on ranks that have them.

    The local tensor of a parameter holds its boxes one after another: flat, each box in row-major
    order; of one box it may have the shape `box.sizes` instead.
    """

    def extent(self, parameter: torch.Tensor) -> Extent:
        """The part of `parameter` that is on this rank."""
        return Extent(tuple(parameter.shape), (Box.whole(tuple(parameter.shape)),))

    def local(self, value: torch.Tensor) -> torch.Tensor:
        """The local tensor of a parameter, or of one laid out so: a view of the memory in use."""
        return value.detach()

    def like(self, parameter: torch.Tensor, local: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        """A tensor laid out like `parameter`, with local tensor `local`, as optimizers keep it."""
        return local

    def empty(self, parameter: torch.Tensor, key: str, dtype: torch.dtype) -> torch.Tensor:  # noqa: ARG002
        """An uninitialised tensor laid out like `parameter`, for its state `key`, to read into."""
        return torch.empty_like(parameter.detach(), dtype=dtype)

    def versioned(self, value: torch.Tensor) -> bool:
        """Whether in-place changes of the local tensor of `value` raise its `_version`."""
        return type(value) in (torch.Tensor, torch.nn.Parameter)


class Whole(Sharding):
    """Parameters are whole on every rank that has them."""
