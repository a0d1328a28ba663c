"""The console script `accelerate`."""

from __future__ import annotations

from accel_compat.commands.main import main
from accel_compat.missing_names import refuse_from

__all__ = ["main"]

__getattr__ = refuse_from(__name__)

if __name__ == "__main__":
    raise SystemExit(main())
