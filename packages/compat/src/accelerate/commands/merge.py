"""`accelerate merge-weights`."""

from __future__ import annotations

from accel_compat.commands.main import merge_weights as main
from accel_compat.commands.others import merge_command, merge_command_parser
from accel_compat.missing_names import refuse_from

__all__ = ["main", "merge_command", "merge_command_parser"]

__getattr__ = refuse_from(__name__)

if __name__ == "__main__":
    raise SystemExit(main())
