"""What a tracker needs beside `accel_core.Tracker` and `TrackedRun`: what values and configurations become on their way to a service."""

from __future__ import annotations

from accel_core.tracking.config_json import readable_config
from accel_core.tracking.scalars import plain_value

__all__ = [
    "plain_value",
    "readable_config",
]
