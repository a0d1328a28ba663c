"""Sharded training is what its suites say on a device that works asynchronously, with streams and collectives of its own."""

from __future__ import annotations

import accel_toydevice  # noqa: F401  (gives torch the device, here and on every rank that imports this file)
from accel_fsdp import FSDP
from accel_testing import CheckpointSuite, StrategySuite


def fsdp():
    """A function of this file, and not the name "fsdp": a rank that imports it has the device."""
    return FSDP()


class TestFSDP(StrategySuite):
    strategy = fsdp
    worlds = (2,)
    cpu = False


class TestFSDPCheckpoints(CheckpointSuite):
    strategy = fsdp
    worlds = (2,)
    cpu = False
