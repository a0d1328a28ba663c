"""Megatron passes the suites that define what a strategy is, where modules need not be Megatron's: under data parallelism.

With tensor, pipeline or expert parallelism a module of the suites is refused by name (test_megatron_bad_input.py): those
meshes are tried with Megatron's own models, in test_megatron_gradients.py, test_megatron_loop.py and test_megatron_resuming.py.
The distributed optimizer steps Adam and AdamW alone, and the suite of strategies steps SGD: it has the suite of checkpoints.
"""

from typing import ClassVar

import megatron_cpu
import pytest

from accel_megatron import Megatron
from accel_testing import CheckpointSuite, StrategySuite


def plain():
    megatron_cpu.use_cpu()
    return Megatron()


def overlapping():
    megatron_cpu.use_cpu()
    return Megatron(overlap_grad_reduce=True)


def distributed():
    megatron_cpu.use_cpu()
    return Megatron(distributed_optimizer=True)


class TestInTwoProcesses(StrategySuite):
    strategy = plain
    worlds = (2,)
    timeout = 300.0


@pytest.mark.full(group="megatron")
class TestInOneProcessAndInFour(StrategySuite):
    strategy = plain
    worlds = (1, 4)
    timeout = 300.0


@pytest.mark.full(group="megatron")
class TestOverlapping(StrategySuite):
    strategy = overlapping
    worlds = (1, 2, 4)
    timeout = 300.0
    lacks: ClassVar = {
        "test_several_models_train_side_by_side": (
            "under an Accelerator each, the first backward of another's loss reaches the critic too, and Megatron-core's buckets "
            "then wait for as many gradients in every step: its AssertionError"
        ),
    }


@pytest.mark.full(group="megatron")
class TestCheckpoints(CheckpointSuite):
    strategy = plain
    worlds = (1, 2, 4)
    timeout = 300.0


@pytest.mark.full(group="megatron")
class TestDistributedCheckpoints(CheckpointSuite):
    strategy = distributed
    worlds = (1, 2, 4)
    timeout = 300.0
    lacks: ClassVar = {
        "test_the_state_of_another_optimizer_is_refused_before_anything_changes": (
            "the other optimizer of that test is SGD, which the distributed optimizer refuses when it is prepared"
        ),
    }
