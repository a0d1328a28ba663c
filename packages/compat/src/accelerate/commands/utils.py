"""The parser of the commands."""

from __future__ import annotations

from accel_compat.commands.options import Parser as CustomArgumentParser
from accel_compat.missing_names import refuse_from

__all__ = ["CustomArgumentParser"]

__getattr__ = refuse_from(__name__)
