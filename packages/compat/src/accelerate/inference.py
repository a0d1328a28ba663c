"""Pipelines, which have no counterpart."""

from accel_compat.missing_names import refuse_from

__getattr__ = refuse_from(__name__)

__all__: list[str] = []
