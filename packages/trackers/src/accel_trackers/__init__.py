"""Trackers: runs recorded with the services that people look at, or in plain files.

One module per service, found by the name of its entry point: `Accelerator(log_with="wandb")`. None
of them imports its service before a run starts, and importing this package imports none of them.
"""

from __future__ import annotations

from accel_trackers.recording.values import plain_value, readable_config
from accel_trackers.throughput import Throughput

__all__ = ["Throughput", "plain_value", "readable_config"]
