"""XLA passes the suites that define what a strategy is, on meshes of one and four devices, whole and sharded."""

import importlib.util
import os

import pytest

if importlib.util.find_spec("torch_xla") is None:  # it is not imported here, which would exchange torch's `new_group`
    pytest.skip("torch_xla fits another torch: nox -s xla", allow_module_level=True)

from accel_core import Accelerator
from accel_testing import CheckpointSuite, StrategySuite, run_ranks
from accel_xla import XLA

pytestmark = pytest.mark.timeout(600)  # the first test of a suite runs its launch, and a launch compiles many graphs


def on_one_device():
    os.environ["CPU_NUM_DEVICES"] = "1"
    return XLA()


def on_four_devices():
    os.environ["CPU_NUM_DEVICES"] = "4"
    return XLA()


def sharded():
    os.environ["CPU_NUM_DEVICES"] = "4"
    return XLA(shard=-1)


def hybrid():
    os.environ["CPU_NUM_DEVICES"] = "4"
    return XLA(shard=2)


def devices_and_mesh(strategy):
    return str(Accelerator(strategy=strategy()).explain())


def test_one_device_is_one():
    [explained] = run_ranks(devices_and_mesh, 1, on_one_device, timeout=300.0)
    assert "1 CPU" in explained
    assert "1 (replicate) x 1 (shard)" in explained


class TestOnOneDevice(StrategySuite):
    strategy = on_one_device
    worlds = (1,)
    timeout = 500.0


class TestOnFourDevices(StrategySuite):
    strategy = on_four_devices
    worlds = (1,)
    timeout = 500.0


class TestSharded(StrategySuite):
    strategy = sharded
    worlds = (1,)
    timeout = 500.0


class TestHybrid(StrategySuite):
    strategy = hybrid
    worlds = (1,)
    timeout = 500.0


class TestOnOneDeviceCheckpoints(CheckpointSuite):
    strategy = on_one_device
    worlds = (1,)
    timeout = 500.0


class TestOnFourDevicesCheckpoints(CheckpointSuite):
    strategy = on_four_devices
    worlds = (1,)
    timeout = 500.0


class TestShardedCheckpoints(CheckpointSuite):
    strategy = sharded
    worlds = (1,)
    timeout = 500.0


class TestHybridCheckpoints(CheckpointSuite):
    strategy = hybrid
    worlds = (1,)
    timeout = 500.0
