"""Megatron passes the suites that define what a strategy is, where modules need not be Megatron's: under data parallelism.

With tensor, pipeline, context or expert parallelism the suites' own modules are refused by name, which is declared here as a lack
for each mesh: those are tried with Megatron's models, in test_megatron_gradients.py, test_megatron_loop.py and
test_megatron_resuming.py. The distributed optimizer steps Adam and AdamW alone, and the suite of strategies steps SGD: it
has the suite of checkpoints.
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


def tensor():
    megatron_cpu.use_cpu()
    return Megatron(tensor_parallel=2)


def pipeline():
    megatron_cpu.use_cpu()
    return Megatron(pipeline_parallel=2)


def tensor_in_a_pipeline():
    megatron_cpu.use_cpu()
    return Megatron(tensor_parallel=2, pipeline_parallel=2, sequence_parallel=True)


def experts():
    megatron_cpu.use_cpu()
    return Megatron(expert_parallel=2)


def context():
    megatron_cpu.use_cpu()
    return Megatron(context_parallel=2)


TRAINS_NOTHING = (
    "test_every_part_of_the_data_is_read_once",
    "test_a_model_that_is_not_trained_can_be_called",
    "test_a_policy_holds_or_is_refused",
    "test_two_optimizers_of_one_model_train",
)
"""Tests of the suite of strategies that pass, for they prepare no model that is trained, or accept that it is refused."""


def lacking(suite, *passed):
    """Every test of a suite but those that pass: why the others fail."""
    reason = (
        "the modules of the suite are not Megatron-core's, whose layers alone it splits: prepare() raises a ValueError"
    )
    return {name: reason for name in vars(suite) if name.startswith("test_") and name not in passed}


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


@pytest.mark.full(group="megatron")
class RefusedInTraining(StrategySuite):
    worlds = (2, 4)
    timeout = 300.0
    lacks: ClassVar = lacking(StrategySuite, *TRAINS_NOTHING)


class TestTensorParallel(RefusedInTraining):
    strategy = tensor


class TestPipeline(RefusedInTraining):
    strategy = pipeline


class TestContextParallel(RefusedInTraining):
    strategy = context


class TestExperts(RefusedInTraining):
    strategy = experts


class TestTensorParallelInAPipeline(RefusedInTraining):
    strategy = tensor_in_a_pipeline
    worlds = (4,)


@pytest.mark.full(group="megatron")
class RefusedCheckpoints(CheckpointSuite):
    worlds = (2, 4)
    timeout = 300.0
    lacks: ClassVar = lacking(CheckpointSuite)


class TestTensorParallelCheckpoints(RefusedCheckpoints):
    strategy = tensor


class TestPipelineCheckpoints(RefusedCheckpoints):
    strategy = pipeline


class TestContextParallelCheckpoints(RefusedCheckpoints):
    strategy = context
