"""Results of a batch from all processes, each sample once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

import accel_core
from accel_compat.nested import recursively_apply
from accel_compat.operations import gather_object

if TYPE_CHECKING:
    from accel_compat.accelerator import Accelerator


def gather_for_metrics(accelerator: Accelerator, data: Any, use_gather_object: bool = False) -> Any:
    """Results with a row per sample without what fills up; others, of a last batch, cut to the samples that are in it."""
    running = accelerator.running_loader
    rows = None if running is None or running.rows is None else running.rows.rows
    sizes = _sizes(data)
    if sizes is None or use_gather_object:
        sizes, by_object = ({len(data)} if isinstance(data, (list, tuple)) else {None}), True
    else:
        by_object = False
    if rows is not None and sizes == {rows}:
        return accel_core.Accelerator.gather_for_metrics(accelerator, data, by_object)  # type: ignore[call-overload]
    gathered = gather_object(data) if by_object else accelerator.gather(data)
    state = accelerator.gradient_state
    kept = state.remainder if state.end_of_dataloader else -1
    if kept <= 0:
        return gathered
    if by_object:
        return gathered[:kept] if isinstance(gathered, (list, tuple)) else gathered
    return recursively_apply(lambda tensor: tensor[:kept], gathered)


def _sizes(data: Any) -> set[int | None] | None:
    """How many rows the tensors have, None for one without dimensions; None if not all are tensors."""
    sizes: set[int | None] = set()

    def measure(leaf: Any) -> None:
        if not isinstance(leaf, torch.Tensor):
            raise TypeError
        sizes.add(leaf.shape[0] if leaf.dim() else None)

    try:
        recursively_apply(measure, data, test_type=lambda _: True)
    except TypeError:
        return None
    return sizes or None
