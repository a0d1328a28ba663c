"""Collectives over nested tensors, as `accel_core.collectives.operations` describes them."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeVar

import torch
import torch.distributed as dist

from accel_core.base.nested import Tree, flatten_with_shape, outline, paths, unflatten
from accel_core.processes.channel import Channel, Letter, Spec
from accel_core.processes.mismatch_report import describe
from accel_core.processes.watch.collective_scope import collective

if TYPE_CHECKING:
    from accel_core.processes.world import World

Reduction = Literal["sum", "mean", "max", "none"]

# Up to so many received bytes, `reduce` sends all to all: one collective. Above: headers, then all_reduce, which moves less.
SMALL_REDUCE = 1 << 20
_REDUCED = (torch.uint8, torch.int8, torch.int32, torch.int64, torch.uint64)  # integers; the last as the backend can
# How a leaf is sent: dtype and trailing dimensions (None: not at all), rows, and what must agree (`*`: may differ).
Measured = tuple[Spec | None, int, list[int | str]]

T = TypeVar("T")


def gather(tree: T, world: World, group: dist.ProcessGroup | None = None) -> T:
    """Concatenates along dim 0 in rank order: `accel_core.gather`. Exactly one collective."""
    channel = channel_of(world, group)
    leaves, shape = flatten_with_shape(tree)
    if channel is None:
        check_tensors("gather", tree, leaves)
        return alone(tree, leaves)
    return unflatten(tree, gather_leaves(channel, tree, leaves, shape))


def reduce_tree(
    tree: T, world: World, reduction: Reduction = "sum", scale: float = 1.0, group: dist.ProcessGroup | None = None
) -> T:
    """Combines tensors over ranks: `accel_core.reduce`; equal bitwise. Collective unless "none"."""
    if reduction == "none":
        return tree
    channel = channel_of(world, group)
    if reduction not in ("sum", "mean", "max"):
        text = f"reduce(reduction={reduction!r}): no such reduction. Choose one of 'sum', 'mean', 'max', 'none'."
        refuse(channel, ValueError(text))
    leaves, shape = flatten_with_shape(tree)
    if channel is None:
        check_tensors("reduce", tree, leaves)
        return unflatten(tree, [_finished(leaf.detach(), 1, leaf, reduction, scale) for leaf in leaves])
    call = f"reduce({reduction!r})" if scale == 1.0 else f"reduce({reduction!r}, scale={scale!r})"
    if bytes_of(leaves) * channel.size > SMALL_REDUCE:
        return unflatten(tree, _all_reduce(channel, call, tree, leaves, shape, reduction, scale))
    letter = letter_for(channel, call, tree, leaves, shape, whole, stacked=True)
    received = zip(channel.exchange(letter, leaves), leaves, strict=True)
    return unflatten(tree, [_combined(part, leaf, reduction, scale) for (part,), leaf in received])


def channel_of(world: World, group: dist.ProcessGroup | None) -> Channel | None:
    """The channel of a group; None if there is nobody else in it."""
    if world.size == 1:
        return None
    channel = world.channel(group)
    return channel if channel.size > 1 else None


def check_source(channel: Channel | None, call: str, source: object) -> None:
    """Refuses a source that is no rank of the group. A collective only if it does."""
    size = 1 if channel is None else channel.size
    if not (isinstance(source, int) and 0 <= source < size):
        refuse(channel, ValueError(f"{call}: the group has {size} ranks; choose one of 0 to {size - 1}."))


def refuse(channel: Channel | None, error: Exception) -> NoReturn:
    """Raises an error about this rank's arguments, on all other ranks too. A collective."""
    if channel is None:
        raise error
    channel.refuse(error)


def bytes_of(leaves: list[Any]) -> int:
    """The size of the tensors in bytes; what `check_tensors` is yet to refuse counts nothing."""
    return sum([leaf.nbytes for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided])


def alone(tree: T, leaves: list[torch.Tensor]) -> T:
    """`gather` in a group of one: `tree`, unless a leaf is 0-d or requires a gradient."""
    if all([leaf.ndim and not leaf.requires_grad for leaf in leaves]):
        return tree
    return unflatten(tree, [leaf.detach() if leaf.ndim else leaf.detach().reshape(1) for leaf in leaves])


def gather_leaves(channel: Channel, tree: Tree, leaves: list[Any], shape: Hashable) -> list[torch.Tensor]:
    """Gathers the leaves of a tree that has been flattened already."""
    letter = letter_for(channel, "gather", tree, leaves, shape, _rows)
    gathered = [torch.cat(parts) for parts in channel.exchange(letter, leaves)]
    return [tensor.to(leaf.device) for tensor, leaf in zip(gathered, leaves, strict=True)]


def letter_for(
    channel: Channel,
    call: str,
    tree: Tree,
    leaves: list[Any],
    shape: Hashable,
    measure: Callable[[torch.Tensor], Measured],
    stacked: bool = False,
) -> Letter:
    """The letter for these leaves, from the channel's store if known. Refuses non-tensors."""
    try:
        key = (call, measure, shape, *[(leaf.dtype, leaf.shape, leaf.layout) for leaf in leaves])
        if (known := channel.letters.get(key)) is not None:
            return known
    except AttributeError:  # not a tensor
        pass
    try:
        check_tensors(call.partition("(")[0], tree, leaves)
    except TypeError as error:
        channel.refuse(error)
    measured = [measure(leaf) for leaf in leaves]
    rows_of = zip(paths(tree, "data"), leaves, measured, strict=True)
    described = [(path, leaf.dtype, sizes) for path, leaf, (_, _, sizes) in rows_of]
    sent = [(spec, rows) for spec, rows, _ in measured if spec is not None]
    specs, rows = [spec for spec, _ in sent], [rows for _, rows in sent]
    return channel.letter(key, lambda: describe(call, outline(tree), described), specs, rows, stacked)


def check_tensors(call: str, tree: Tree, leaves: list[Any]) -> None:
    """Raises a TypeError that names the first leaf that is no strided tensor. No collective."""
    for path, leaf in zip(paths(tree, "data"), leaves, strict=True):
        if not isinstance(leaf, torch.Tensor):
            raise TypeError(
                f"{call}() takes tensors in nested tuples, lists and dicts; {path} is a {type(leaf).__name__}. Use "
                f"torch.tensor(...), or for one object per sample "
                f"accelerator.gather_for_metrics(objects, use_gather_object=True)."
            )
        if leaf.layout is not torch.strided:
            raise TypeError(
                f"{call}() takes strided tensors; {path} has the layout {leaf.layout}. Pass {path}.to_dense()."
            )


def _rows(leaf: torch.Tensor) -> Measured:
    """For gather: rows may differ between the ranks."""
    if leaf.ndim == 0:
        return (leaf.dtype, ()), 1, ["*"]
    rows, *sizes = leaf.shape
    return (leaf.dtype, tuple(sizes)), rows, ["*", *sizes]


def whole(leaf: torch.Tensor) -> Measured:
    """The leaf as one row, all of whose shape must agree."""
    return (leaf.dtype, tuple(leaf.shape)), 1, list(leaf.shape)


def header_only(leaf: torch.Tensor) -> Measured:
    """For what is large: the shape must agree, and the values are sent by other means."""
    return None, 0, list(leaf.shape)


def _all_reduce(
    channel: Channel, call: str, tree: Tree, leaves: list[Any], shape: Hashable, reduction: Reduction, scale: float
) -> list[torch.Tensor]:
    """Compares headers, then calls all_reduce once per dtype."""
    letter = letter_for(channel, call, tree, leaves, shape, header_only)
    by_dtype, place = dict[torch.dtype, list[torch.Tensor]](), channel.device
    try:
        for leaf in leaves:
            by_dtype.setdefault(_wire_dtype(leaf, reduction), []).append(leaf.detach().reshape(-1))
        flats = {dtype: torch.cat([leaf.to(place, dtype) for leaf in same]) for dtype, same in by_dtype.items()}
    except RuntimeError as error:  # out of memory, say: the other ranks are waiting
        channel.refuse(error)
    channel.exchange(letter, ())
    remaining = {}
    for dtype, flat in flats.items():
        with collective("reduce()"):
            if reduction == "max":
                _all_reduce_max(flat, channel)
            else:
                dist.all_reduce(flat, group=channel.group)
        remaining[dtype] = iter(flat.split([len(leaf) for leaf in by_dtype[dtype]]))
    totals = [next(remaining[_wire_dtype(leaf, reduction)]).view(leaf.shape) for leaf in leaves]
    return [_finished(total, channel.size, leaf, reduction, scale) for total, leaf in zip(totals, leaves, strict=True)]


def _all_reduce_max(flat: torch.Tensor, channel: Channel) -> None:
    """The maximum over the ranks, in place; NaN on any rank gives NaN, whatever the backend."""
    lost = flat.isnan().to(torch.uint8) if flat.is_floating_point() else None
    dist.all_reduce(flat, dist.ReduceOp.MAX, group=channel.group)
    if lost is not None:
        dist.all_reduce(lost, dist.ReduceOp.MAX, group=channel.group)
        flat.masked_fill_(lost.bool(), torch.nan)


def _wire_dtype(leaf: torch.Tensor, reduction: Reduction) -> torch.dtype:
    """The dtype in which a large tensor is reduced: one that all backends take, and that holds the result."""
    if leaf.is_complex() or leaf.is_floating_point():
        return leaf.dtype if leaf.itemsize > 1 else torch.float32
    if reduction == "max" and leaf.dtype == torch.bool:
        return torch.uint8
    return leaf.dtype if reduction != "mean" and leaf.dtype in _REDUCED else torch.int64


def _combined(stacked: torch.Tensor, leaf: torch.Tensor, reduction: Reduction, scale: float) -> torch.Tensor:
    """Reduces the first dimension, over the ranks."""
    stacked = stacked.to(_wire_dtype(leaf, reduction))  # torch sums neither 8-bit floats nor all integers
    if reduction == "max":
        return _finished(stacked.amax(0), 1, leaf, reduction, scale)
    if reduction == "mean" and (leaf.is_floating_point() or leaf.is_complex()):
        return _finished(stacked.mean(0), 1, leaf, reduction, scale)
    return _finished(stacked.sum(0), len(stacked), leaf, reduction, scale)


def _finished(total: torch.Tensor, ranks: int, leaf: torch.Tensor, reduction: Reduction, scale: float) -> torch.Tensor:
    """Divides by the number of ranks for a mean, scales, and sets the result's dtype, device."""
    if reduction == "mean" and ranks > 1:
        total = total / ranks
    if scale != 1.0:
        total = total * scale
    dtype = leaf.dtype
    if not (leaf.is_floating_point() or leaf.is_complex()):
        if reduction == "mean" or scale != 1.0:
            dtype = torch.get_default_dtype()
        elif reduction == "sum" and dtype == torch.bool:
            dtype = torch.int64
    return total.to(leaf.device, dtype)
