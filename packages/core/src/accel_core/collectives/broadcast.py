"""Tensors of one rank for all: small trees in one exchange, large ones compared, then sent."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from accel_core.base.nested import Tree, flatten_with_shape, unflatten
from accel_core.collectives import reduce_gather
from accel_core.processes.watch.collective_scope import collective

if TYPE_CHECKING:
    from accel_core.processes.channel import Channel
    from accel_core.processes.world import World

T = TypeVar("T")

SMALL_BROADCAST = 1 << 20  # bytes that a rank receives: up to these, a tree goes in one exchange
PARCEL = 4 << 20  # bytes that are packed together: so much extra memory, and a tensor at least as large goes unpacked


def broadcast(tree: T, world: World, source: int = 0, group: dist.ProcessGroup | None = None) -> T:
    """The tensors of one rank of the group, on every rank: `accel_core.broadcast`. A collective."""
    channel = reduce_gather.channel_of(world, group)
    call = f"broadcast(from_process={source!r})"
    reduce_gather.check_source(channel, call, source)
    if channel is None:
        reduce_gather.check_tensors("broadcast", tree, flatten_with_shape(tree)[0])
        return tree
    return broadcast_from(channel, call, tree, source)


def broadcast_from(channel: Channel, call: str, tree: T, source: int) -> T:
    """Gives every rank the tensors of `source`; `call` names the source if that varies."""
    leaves, shape = flatten_with_shape(tree)
    if reduce_gather.bytes_of(leaves) * channel.size > SMALL_BROADCAST:
        received = _large(channel, call, tree, leaves, shape, source)
    else:
        measure, sent = (reduce_gather.whole, leaves) if channel.rank == source else (_awaited, [])
        parts = channel.exchange(reduce_gather.letter_for(channel, call, tree, leaves, shape, measure), sent)
        received = [part[source][0].clone() for part in parts]
    # What was received goes to where the argument is; a meta tensor is nowhere.
    placed = [tensor if leaf.is_meta else tensor.to(leaf.device) for tensor, leaf in zip(received, leaves, strict=True)]
    return unflatten(tree, placed)


def _large(
    channel: Channel, call: str, tree: Tree, leaves: list[Any], shape: Hashable, source: int
) -> list[torch.Tensor]:
    """Compares headers, then broadcasts bytes, which backends move whatever the dtype is."""
    letter = reduce_gather.letter_for(channel, call, tree, leaves, shape, reduce_gather.header_only)
    try:
        received = [torch.empty(leaf.shape, dtype=leaf.dtype, device=channel.device) for leaf in leaves]
        if channel.rank == source:
            for tensor, leaf in zip(received, leaves, strict=True):
                tensor.copy_(leaf.detach())
    except RuntimeError as error:  # out of memory, say: the other ranks are waiting
        channel.refuse(error)
    channel.exchange(letter, ())
    for contents in _parcels([tensor.view(-1).view(torch.uint8) for tensor in received]):
        parcel = torch.cat(contents) if len(contents) > 1 else contents[0]
        with collective("broadcast()"):
            dist.broadcast(parcel, group=channel.group, group_src=source)
        if len(contents) > 1:
            for content, part in zip(contents, parcel.split([len(content) for content in contents]), strict=True):
                content.copy_(part)
    return received


def _parcels(contents: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Puts small contents together, in order, up to `PARCEL` bytes; empty ones are not sent."""
    together: list[torch.Tensor] = []
    size = 0
    for content in contents:
        if len(content) >= PARCEL:
            yield [content]
        elif len(content):
            if size + len(content) > PARCEL:
                yield together
                together, size = [], 0
            together.append(content)
            size += len(content)
    if together:
        yield together


def _awaited(leaf: torch.Tensor) -> reduce_gather.Measured:
    """On ranks that receive: no row, of the same kind."""
    return (leaf.dtype, tuple(leaf.shape)), 0, list(leaf.shape)
