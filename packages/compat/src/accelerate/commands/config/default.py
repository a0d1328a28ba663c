"""`accelerate config default`."""

from __future__ import annotations

from accel_compat.commands.config import default_config_command, write_basic_config
from accel_compat.missing_names import refuse_from

__all__ = ["default_config_command", "write_basic_config"]

__getattr__ = refuse_from(__name__)
