"""`accelerate config`, and its files."""

from __future__ import annotations

from accel_compat.commands.config import get_config_parser
from accel_compat.commands.config_file import default_config_file, load_config_from_file
from accel_compat.commands.main import config as main
from accel_compat.missing_names import refuse_from

__all__ = ["default_config_file", "get_config_parser", "load_config_from_file", "main"]

__getattr__ = refuse_from(__name__)
