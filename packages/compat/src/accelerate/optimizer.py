"""The type of prepared optimizers."""

from accel_compat.missing_names import refuse_from
from accel_compat.nested import send_to_device as move_to_device
from accel_compat.optimizer import AcceleratedOptimizer

__getattr__ = refuse_from(__name__)

__all__ = ["AcceleratedOptimizer", "move_to_device"]
