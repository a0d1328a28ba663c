"""Versions."""

from accel_compat.missing_names import refuse_from
from accel_compat.versions import STR_OPERATION_TO_FUNC, compare_versions, is_torch_version, torch_version

__getattr__ = refuse_from(__name__)

__all__ = [
    "STR_OPERATION_TO_FUNC", "compare_versions", "is_torch_version", "torch_version",
]  # fmt: skip
