"""The commands of `accelerate`."""

from __future__ import annotations

from accel_compat.missing_names import refuse_from

__all__ = []

__getattr__ = refuse_from(__name__)
