"""Sizes of the axes of a mesh."""

from accel_compat.missing_names import refuse_from
from accel_compat.plugins import ParallelismConfig

__getattr__ = refuse_from(__name__)

__all__ = [
    "ParallelismConfig",
]  # fmt: skip
