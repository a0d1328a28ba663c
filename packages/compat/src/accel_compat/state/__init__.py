"""The state that a process shares: its processes, the set-up of its Accelerator, and where its loop stands.

Scripts and libraries ask for these without an Accelerator in hand, and reset them. Nothing else of this project is process-wide.
"""

from accel_compat.state.accelerator_state import AcceleratorState, is_initialized
from accel_compat.state.gradient_state import GradientState
from accel_compat.state.processes import PartialState

__all__ = ["AcceleratorState", "GradientState", "PartialState", "is_initialized"]
