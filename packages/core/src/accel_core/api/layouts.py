"""Layouts of state on ranks: hooks `model_state`, `optimizer_state` and `gradient_state`."""

from accel_core.contract.tensor_layouts import (
    Alias,
    Box,
    Elementwise,
    Entry,
    GradientState,
    Opaque,
    Partial,
    Piece,
    Replicated,
    State,
)

__all__ = [
    "Alias", "Box", "Elementwise", "Entry", "GradientState", "Opaque", "Partial", "Piece", "Replicated", "State",
]  # fmt: skip
