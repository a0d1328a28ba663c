"""`accelerate to-fsdp2`."""

from __future__ import annotations

from accel_compat.commands.fsdp2 import (
    convert_config_to_fsdp2,
    load_config,
    to_fsdp2_command,
    to_fsdp2_command_parser,
)
from accel_compat.missing_names import refuse_from

__all__ = ["convert_config_to_fsdp2", "load_config", "to_fsdp2_command", "to_fsdp2_command_parser"]

__getattr__ = refuse_from(__name__)
