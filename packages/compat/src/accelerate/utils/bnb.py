"""Quantised weights."""

from accel_big_model import load_and_quantize_model
from accel_compat.fp8_layers import has_4bit_bnb_layers
from accel_compat.missing_names import refuse_from

__getattr__ = refuse_from(__name__)

__all__ = [
    "has_4bit_bnb_layers", "load_and_quantize_model",
]  # fmt: skip
