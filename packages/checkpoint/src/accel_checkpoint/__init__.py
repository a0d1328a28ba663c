"""The neutral checkpoint: state of no strategy, saved by any number of ranks, loaded by any other.

The names here are the door: strategies and tests import them, and no inner module. Inside, read in
this order:

    component           what the core finds: the hooks `save_checkpoint` and `load_checkpoint`
    checkpoints         of one Accelerator: where they go, how many are kept
    run_state, model_state, optimizers/    what of a run is saved
    boxes               ranges of elements as boxes; whether boxes cover a shape
    plan, writing       who writes what
    deferred            what is read only then
    codec/              Python objects as JSON and tensors
    files/              what lies on the disk, and how it is published: all of it, or nothing
    saving, background  the order of a save; one that is written behind
    collective_steps    work that fails on all ranks, or on none
    reading, loading    what is compared before a load, and the order in which it restores
    inspection/         `accel checkpoint`, `python -m accel_core checkpoint`
    importing/          `accel checkpoint import`: checkpoints of other libraries, by importers
    weights/            apart from all this: a model's weights as plain files
"""

from __future__ import annotations

from accel_checkpoint.assembling import WeightGather, gather_entry
from accel_checkpoint.boxes import flat_range, uncovered
from accel_checkpoint.collective_steps import everywhere, on_each_rank, on_main_rank
from accel_checkpoint.component import NeutralCheckpoints
from accel_checkpoint.importing.foreign import ForeignCheckpoint, ForeignOptimizer
from accel_checkpoint.inspection.values import read_values
from accel_checkpoint.model_state import capture_model, elementwise_entry
from accel_checkpoint.optimizers.known_optimizers import (
    COUNTER,
    ELEMENTWISE,
    OF_THIS_PROCESS,
    REPLICATED,
    is_known,
    kind_of,
    layouts_of,
)
from accel_checkpoint.optimizers.optimizer_state import capture_optimizer, list_misfits, restore_optimizer
from accel_checkpoint.optimizers.parameter_state import has_tensors
from accel_checkpoint.optimizers.sharding import Extent, Sharding, Whole, pieces_of
from accel_checkpoint.run_state import check_moment
from accel_checkpoint.weights.exporting import Exported, export_weights
from accel_checkpoint.weights.loading import load_checkpoint_in_model, load_weights
from accel_checkpoint.weights.saving import write_weights
from accel_checkpoint.weights.sources import stored_in

__all__ = [
    "COUNTER", "ELEMENTWISE", "OF_THIS_PROCESS", "REPLICATED", "Exported", "Extent", "ForeignCheckpoint",
    "ForeignOptimizer", "NeutralCheckpoints", "Sharding", "WeightGather", "Whole", "capture_model",
    "capture_optimizer", "check_moment", "elementwise_entry", "everywhere", "export_weights", "flat_range",
    "gather_entry", "has_tensors", "is_known", "kind_of", "layouts_of", "list_misfits", "load_checkpoint_in_model",
    "load_weights", "on_each_rank", "on_main_rank", "pieces_of", "read_values", "restore_optimizer", "stored_in", "uncovered",
    "write_weights",
]  # fmt: skip

__version__ = "0.1.0"
