"""`accelerate estimate-memory`."""

from __future__ import annotations

from accel_compat.commands.main import estimate_memory as main
from accel_compat.commands.others import estimate_command, estimate_command_parser
from accel_compat.missing_names import refuse_from

__all__ = ["estimate_command", "estimate_command_parser", "main"]

__getattr__ = refuse_from(__name__)

if __name__ == "__main__":
    raise SystemExit(main())
