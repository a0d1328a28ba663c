"""States of a script's own objects; `Accelerator.save_state` and `load_state` are for the rest."""

from accel_compat.custom_states import load_custom_state, save_custom_state
from accel_compat.missing_names import refuse_from

__getattr__ = refuse_from(__name__)

__all__ = ["load_custom_state", "save_custom_state"]
