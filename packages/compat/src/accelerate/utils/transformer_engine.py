"""fp8 by Transformer Engine."""

from accel_compat.fp8_layers import has_transformer_engine_layers
from accel_compat.missing_names import refuse_from

__getattr__ = refuse_from(__name__)

__all__ = [
    "has_transformer_engine_layers",
]  # fmt: skip
