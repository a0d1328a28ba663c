"""Megatron passes the suites that define what a strategy is, where a module need not be Megatron's: without model parallelism."""

import megatron_cpu
import pytest

from accel_megatron import Megatron
from accel_testing import CheckpointSuite, StrategySuite


def plain():
    megatron_cpu.use_cpu()
    return Megatron()


def distributed():
    megatron_cpu.use_cpu()
    return Megatron(distributed_optimizer=True)


class TestPlain(StrategySuite):
    strategy = plain


class TestPlainCheckpoints(CheckpointSuite):
    strategy = plain


@pytest.mark.full
class TestDistributed(StrategySuite):
    strategy = distributed


class TestDistributedCheckpoints(CheckpointSuite):
    strategy = distributed
