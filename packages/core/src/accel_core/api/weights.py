"""How the weights of a sharded model are put together, read and written."""

from __future__ import annotations

from accel_core.checkpoint.assembling import WeightGather, gather_entry
from accel_core.checkpoint.weights.loading import load_weights
from accel_core.checkpoint.weights.saving import write_weights

__all__ = [
    "WeightGather",
    "gather_entry",
    "load_weights",
    "write_weights",
]
