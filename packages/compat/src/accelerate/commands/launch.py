"""`accelerate launch`."""

from __future__ import annotations

from accel_compat.commands.launch import launch_command, launch_command_parser
from accel_compat.commands.main import launch as main
from accel_compat.commands.merging import merge as _validate_launch_command
from accel_compat.missing_names import refuse_from

__all__ = ["_validate_launch_command", "launch_command", "launch_command_parser", "main"]

__getattr__ = refuse_from(__name__)

if __name__ == "__main__":
    raise SystemExit(main())
