"""How a strategy presents models and optimizers to checkpoints, and is asked for them."""

from __future__ import annotations

from accel_core.checkpoint.collective_steps import on_each_rank, on_main_rank
from accel_core.checkpoint.model_state import capture_model, elementwise_entry, names_of
from accel_core.checkpoint.optimizers.known_optimizers import (
    COUNTER,
    ELEMENTWISE,
    OF_THIS_PROCESS,
    REPLICATED,
    is_known,
    kind_of,
    layouts_of,
)
from accel_core.checkpoint.optimizers.optimizer_state import (
    OptimizerState,
    SavedOptimizer,
    capture_optimizer,
    list_misfits,
    restore_optimizer,
)
from accel_core.checkpoint.optimizers.parameter_state import has_tensors
from accel_core.checkpoint.run_state import has_state

__all__ = [
    "COUNTER",
    "ELEMENTWISE",
    "OF_THIS_PROCESS",
    "OptimizerState",
    "REPLICATED",
    "SavedOptimizer",
    "capture_model",
    "capture_optimizer",
    "elementwise_entry",
    "has_state",
    "has_tensors",
    "is_known",
    "kind_of",
    "layouts_of",
    "list_misfits",
    "names_of",
    "on_each_rank",
    "on_main_rank",
    "restore_optimizer",
]
