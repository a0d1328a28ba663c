"""FSDP passes the suites that define what a strategy is."""

from accel_fsdp import FSDP
from accel_testing import CheckpointSuite, StrategySuite


def hybrid():
    return FSDP(replicate=2)


class TestFSDP(StrategySuite):
    strategy = FSDP


class TestFSDPCheckpoints(CheckpointSuite):
    strategy = FSDP


class TestHybridCheckpoints(CheckpointSuite):
    strategy = hybrid
    worlds = (4,)
