"""Helpers of Megatron-LM, which accel-megatron does without; `MegatronLMPlugin` is in `accelerate.utils`."""

from accel_compat.missing_names import refuse_from

__getattr__ = refuse_from(__name__)

__all__: list[str] = []
