"""`python -m accelerate.commands.config`."""

from accel_compat.commands.main import config

raise SystemExit(config())
