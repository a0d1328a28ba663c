"""Names for strategies beside `accel_core.Strategy`: calls, compiling, steps, new parameters."""

from accel_core.contract.precision_policy import cast_parameters, override_calls
from accel_core.facade.older_arguments import chosen_strategy
from accel_core.loop.compilation import compile_calls
from accel_core.loop.forward_methods import mark_forward_method
from accel_core.loop.fused_backward import is_fused
from accel_core.loop.optimizer_gate import gate_of
from accel_core.loop.preparation import MoveState, ParameterReplacement
from accel_core.strategies.placement import check_alike

__all__ = [
    "MoveState", "ParameterReplacement", "cast_parameters", "check_alike", "chosen_strategy", "compile_calls",
    "gate_of", "is_fused", "mark_forward_method", "override_calls",
]  # fmt: skip
