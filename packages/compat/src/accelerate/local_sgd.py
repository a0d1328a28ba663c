"""Local SGD."""

from accel_compat.missing_names import refuse_from
from accel_core import LocalSGD

__getattr__ = refuse_from(__name__)

__all__ = ["LocalSGD"]
