"""The type of prepared LR schedulers."""

from accel_compat.missing_names import refuse_from
from accel_compat.scheduler import AcceleratedScheduler

__getattr__ = refuse_from(__name__)

__all__ = ["AcceleratedScheduler"]
