"""Memory: an older place of names in `accelerate.utils`."""

from accel_compat.missing_names import refuse_from
from accel_core import find_executable_batch_size

__getattr__ = refuse_from(__name__)

__all__ = ["find_executable_batch_size"]
