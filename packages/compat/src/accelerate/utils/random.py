"""Seeds, and random streams that processes share."""

from accel_compat.missing_names import refuse_from
from accel_core import set_seed, synchronize_rng_state, synchronize_rng_states

__getattr__ = refuse_from(__name__)

__all__ = [
    "set_seed", "synchronize_rng_state", "synchronize_rng_states",
]  # fmt: skip
