"""DeepSpeed passes the suites that define what a strategy is, in every stage of ZeRO."""

from typing import ClassVar

import pytest

from accel_deepspeed import DeepSpeed
from accel_testing import CheckpointSuite, StrategySuite


def stage_0():
    return DeepSpeed(zero_stage=0)


def stage_1():
    return DeepSpeed(zero_stage=1)


def stage_2():
    return DeepSpeed(zero_stage=2)


def stage_3():
    return DeepSpeed(zero_stage=3)


@pytest.mark.full
class TestStage0(StrategySuite):
    strategy = stage_0


@pytest.mark.full
class TestStage1(StrategySuite):
    strategy = stage_1


class TestStage2(StrategySuite):
    strategy = stage_2


class TestStage3(StrategySuite):
    strategy = stage_3
    lacks: ClassVar = {
        "test_several_backwards_of_one_forward_add_up": "parameters are let go of after the first backward of a forward",
    }


@pytest.mark.full
class TestStage0Checkpoints(CheckpointSuite):
    strategy = stage_0


@pytest.mark.full
class TestStage1Checkpoints(CheckpointSuite):
    strategy = stage_1


class TestStage2Checkpoints(CheckpointSuite):
    strategy = stage_2


class TestStage3Checkpoints(CheckpointSuite):
    strategy = stage_3
