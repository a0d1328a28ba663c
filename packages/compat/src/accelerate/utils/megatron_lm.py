"""Megatron-LM, which has no package of ours yet."""

from accel_compat.missing_names import refuse_from

__getattr__ = refuse_from(__name__)

__all__: list[str] = []
