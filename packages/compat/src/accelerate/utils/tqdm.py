"""Progress bars."""

from accel_compat.missing_names import refuse_from
from accel_compat.run_helpers import tqdm

__getattr__ = refuse_from(__name__)

__all__ = [
    "tqdm",
]  # fmt: skip
