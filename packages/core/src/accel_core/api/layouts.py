"""Layouts of state on ranks: hooks `model_state`, `optimizer_state` and `gradient_state`."""

from accel_core.contract.tensor_layouts import (
    Alias,
    Box,
    Elementwise,
    Entry,
    Extent,
    GradientState,
    Opaque,
    Partial,
    Piece,
    Replicated,
    Sharding,
    State,
    Whole,
    flat_range,
    pieces_of,
)

__all__ = [
    "Alias", "Box", "Elementwise", "Entry", "Extent", "GradientState", "Opaque", "Partial", "Piece", "Replicated",
    "Sharding", "State", "Whole", "flat_range", "pieces_of",
]  # fmt: skip
