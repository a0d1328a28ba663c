"""`accelerate test`."""

from __future__ import annotations

from accel_compat.commands.others import test_command, test_command_parser
from accel_compat.missing_names import refuse_from

__all__ = ["test_command", "test_command_parser"]

__getattr__ = refuse_from(__name__)
