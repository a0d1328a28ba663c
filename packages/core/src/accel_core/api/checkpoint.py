"""Names for checkpoint formats: the run to save, and its parts."""

from accel_core.contract.default_components import PLACEMENT, CheckpointComponent
from accel_core.contract.hook_specs import LAYOUT_HOOKS
from accel_core.contract.tensor_layouts import WHOLE, OptimizerState, SavedEntry, SavedOptimizer, memory_of
from accel_core.loading.index_source import has_state
from accel_core.loop.accumulation import Accumulation
from accel_core.loop.optimizer_gate import held_by
from accel_core.loop.preparation import Prepared, PreparedModel
from accel_core.loop.run import Asynchronous, LoadHook, Run, SaveHook, names_of
from accel_core.plugins.explain import Explanation, format_table
from accel_core.plugins.offers import find_default
from accel_core.processes.random_state import TORCH_STREAM, begin_random_state, check_random_state
from accel_core.processes.watch.stack_location import raising_line

__all__ = [
    "LAYOUT_HOOKS", "PLACEMENT", "TORCH_STREAM", "WHOLE", "Accumulation", "Asynchronous", "CheckpointComponent",
    "Explanation", "LoadHook", "OptimizerState", "Prepared", "PreparedModel", "Run", "SaveHook", "SavedEntry",
    "SavedOptimizer", "begin_random_state", "check_random_state", "find_default", "format_table", "has_state",
    "held_by", "memory_of", "names_of", "raising_line",
]  # fmt: skip
