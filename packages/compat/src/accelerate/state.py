"""The state of this process."""

from accel_compat.missing_names import refuse_from
from accel_compat.state import AcceleratorState, GradientState, PartialState, is_initialized
from accel_core import DistributedType

__getattr__ = refuse_from(__name__)

__all__ = ["AcceleratorState", "DistributedType", "GradientState", "PartialState", "is_initialized"]
