"""The strategies, checkpoints and loaders of the product are what their suites say, on a device that works asynchronously."""

from __future__ import annotations

import accel_toydevice  # noqa: F401  (gives torch the device, here and on every rank that imports this file)
from accel_core import DDP, Single
from accel_data import Sharded
from accel_testing import CheckpointSuite, LoaderSuite, StrategySuite


def single():
    """A function of this file, and not the name "single": a rank that imports it has the device."""
    return Single()


def ddp():
    return DDP()


def sharded():
    return Sharded()


def dispatching():
    return Sharded(dispatch_batches=True)


class TestSingle(StrategySuite):
    strategy = single
    worlds = (1,)
    cpu = False


class TestDDP(StrategySuite):
    strategy = ddp
    worlds = (2,)
    cpu = False


class TestSingleCheckpoints(CheckpointSuite):
    strategy = single
    worlds = (1,)
    cpu = False


class TestDDPCheckpoints(CheckpointSuite):
    strategy = ddp
    worlds = (2,)
    cpu = False


class TestSharded(LoaderSuite):
    loader = sharded
    worlds = (2,)
    cpu = False


class TestDispatching(LoaderSuite):
    loader = dispatching
    worlds = (2,)
    cpu = False
