"""The names of Hugging Face Accelerate, served by accel-compat. The modules below have names, and no code."""

from accel_compat.distribution import VERSION as __version__  # noqa: N811  (libraries read it)
from accel_compat.distribution import refuse_another
from accel_compat.missing_names import refuse_from

refuse_another()
__getattr__ = refuse_from(__name__)

__all__ = ["__version__"]
