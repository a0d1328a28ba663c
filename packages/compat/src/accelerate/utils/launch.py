"""The launcher's part for scripts that start processes themselves; its other parts have no counterpart here."""

from accel_compat.missing_names import refuse_from
from accel_compat.run_helpers import PrepareForLaunch

__getattr__ = refuse_from(__name__)

__all__ = ["PrepareForLaunch"]
