"""The Accelerator."""

from accel_compat.accelerator import Accelerator
from accel_compat.missing_names import refuse_from
from accel_compat.plugins import DataLoaderConfiguration, GradientAccumulationPlugin

__getattr__ = refuse_from(__name__)

__all__ = ["Accelerator", "DataLoaderConfiguration", "GradientAccumulationPlugin"]
