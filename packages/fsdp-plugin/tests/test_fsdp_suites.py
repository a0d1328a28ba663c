"""FSDP passes the suites that define what a strategy is."""

from accel_core.testing import CheckpointSuite, StrategySuite
from accel_fsdp import FSDP


def hybrid():
    return FSDP(replicate=2)


class TestFSDP(StrategySuite):
    strategy = FSDP


class TestFSDPCheckpoints(CheckpointSuite):
    strategy = FSDP


class TestHybridCheckpoints(CheckpointSuite):
    strategy = hybrid
    worlds = (4,)
