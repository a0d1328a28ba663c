"""Functions on several processes."""

from accel_compat.missing_names import refuse_from
from accel_launch import debug_launcher, notebook_launcher

__getattr__ = refuse_from(__name__)

__all__ = [
    "debug_launcher", "notebook_launcher",
]  # fmt: skip
