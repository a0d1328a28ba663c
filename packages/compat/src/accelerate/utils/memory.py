"""Memory that runs out."""

from accel_compat.memory import find_executable_batch_size, get_xpu_available_memory, should_reduce_batch_size
from accel_compat.missing_names import refuse_from
from accel_core import clear_device_cache, release_memory

__getattr__ = refuse_from(__name__)

__all__ = [
    "clear_device_cache", "find_executable_batch_size", "get_xpu_available_memory", "release_memory",
    "should_reduce_batch_size",
]  # fmt: skip
