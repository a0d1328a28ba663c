"""`accelerate config`."""

from __future__ import annotations

from accel_compat.commands.config import config_command, get_config_parser
from accel_compat.commands.config_file import (
    cache_dir,
    default_config_file,
    default_yaml_config_file,
    load_config_from_file,
)
from accel_compat.missing_names import refuse_from

__all__ = [
    "cache_dir",
    "config_command",
    "default_config_file",
    "default_yaml_config_file",
    "get_config_parser",
    "load_config_from_file",
]

__getattr__ = refuse_from(__name__)
