"""fp8 by torchao."""

from accel_compat.fp8_layers import (
    convert_model_to_fp8_ao,
    filter_first_and_last_linear_layers,
    filter_linear_layers,
    find_first_last_linear_layers,
    has_ao_layers,
)
from accel_compat.missing_names import refuse_from

__getattr__ = refuse_from(__name__)

__all__ = [
    "convert_model_to_fp8_ao", "filter_first_and_last_linear_layers", "filter_linear_layers",
    "find_first_last_linear_layers", "has_ao_layers",
]  # fmt: skip
