"""`accelerate config update`."""

from __future__ import annotations

from accel_compat.commands.config import update_config, update_config_command
from accel_compat.missing_names import refuse_from

__all__ = ["update_config", "update_config_command"]

__getattr__ = refuse_from(__name__)
