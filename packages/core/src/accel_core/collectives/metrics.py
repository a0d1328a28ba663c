"""Gathering for metrics: padding is cut off before sending, so every sample counts once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from accel_core.base.nested import Tree, flatten_with_shape, paths, unflatten
from accel_core.collectives.objects import gather_objects
from accel_core.collectives.reduce_gather import alone, channel_of, gather_leaves
from accel_core.contract.loader_progress import PASSED, Rows

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from accel_core.processes.channel import Channel
    from accel_core.processes.world import World

_LATE = "gather_for_metrics was called after the loop over a prepared loader had ended, whose last batch on this rank was filled up."
_HOW = "Call gather_for_metrics once per batch, inside the loop over the prepared loader."


def gather_for_metrics(
    data: Tree, rows: Rows | None, world: World, group: ProcessGroup | None = None, use_gather_object: bool = False
) -> Tree:
    """See `Accelerator.gather_for_metrics`. Exactly one collective; 0-d tensors give one per rank.

    `rows` are from `Feed.current_rows()`; None gathers everything. Raises on every rank `ValueError`
    if there is not one row per sample, `TypeError` for objects in no list or tuple, or beside tensors.
    """
    channel = channel_of(world, group)
    if rows is PASSED:
        rows = None
        if channel is not None:
            channel.refuse(ValueError(f"{_LATE} {_HOW}"))
    leaves, shape = flatten_with_shape(data)
    if use_gather_object or not leaves or not all([isinstance(leaf, torch.Tensor) for leaf in leaves]):
        return _objects_for_metrics(channel, data, rows, world, group, use_gather_object)
    if channel is not None and rows is not None:
        for index, leaf in enumerate(leaves):
            if leaf.ndim and rows.rows not in (None, leaf.shape[0]):
                channel.refuse(_not_per_sample(data, index, leaf, rows))
    if rows is not None and _is_padded(rows):
        leaves = [leaf[: rows.real] if leaf.ndim and rows.rows in (None, leaf.shape[0]) else leaf for leaf in leaves]
        data = data if channel is not None else unflatten(data, leaves)
    return alone(data, leaves) if channel is None else unflatten(data, gather_leaves(channel, data, leaves, shape))


def _objects_for_metrics(
    channel: Channel | None, data: Any, rows: Rows | None, world: World, group: Any, asked: bool
) -> Any:
    is_list = isinstance(data, (list, tuple))
    if channel is None:
        padded = is_list and rows is not None and rows.rows in (None, len(data)) and _is_padded(rows)
        return data[: rows.real] if padded and rows is not None else data
    # Several results of a batch, `(predictions, None)`, may be as many as it has samples.
    if not is_list or not (asked or len({isinstance(each, torch.Tensor) for each in data}) <= 1):
        channel.refuse(
            TypeError(
                f"gather_for_metrics({type(data).__name__}): values that are no tensors are gathered from a list or a "
                f"tuple with one object per sample. Gather tensors and each list of objects in calls of their own."
            )
        )
    if rows is not None and rows.rows not in (None, len(data)):
        channel.refuse(
            ValueError(
                f"gather_for_metrics: a list of {len(data)} objects does not have one per sample of the batch, which "
                f"has {rows.rows} rows on this rank. {_HOW} For other lists use torch.distributed.all_gather_object."
            )
        )
    return gather_objects(data if rows is None else data[: rows.real], world, group)


def _not_per_sample(data: Tree, index: int, leaf: torch.Tensor, rows: Rows) -> ValueError:
    return ValueError(
        f"gather_for_metrics: {paths(data, 'data')[index]} with shape {list(leaf.shape)} does not have one row per sample "
        f"of the batch, which has {rows.rows} rows on this rank. {_HOW} For values that are not per sample use gather(); "
        f"for a list of one tensor per sample, use_gather_object=True."
    )


def _is_padded(rows: Rows) -> bool:
    return rows.rows is None or rows.real < rows.rows
