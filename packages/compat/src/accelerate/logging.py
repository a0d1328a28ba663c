"""Loggers."""

from accel_compat.logging import MultiProcessAdapter, get_logger
from accel_compat.missing_names import refuse_from

__getattr__ = refuse_from(__name__)

__all__ = ["MultiProcessAdapter", "get_logger"]
