"""Strategies that keep gradients, run windows or step in a way of their own train as one process does."""

from __future__ import annotations

import pytest
import torch
from gradient_strategies import InABuffer, InParts, RunsWindows
from torch import nn

from accel_core import Accelerator
from accel_core.testing import CheckpointSuite, StrategySuite


class TestRunsWindows(StrategySuite):
    strategy = RunsWindows
    worlds = (2,)


class TestInABuffer(StrategySuite):
    strategy = InABuffer
    worlds = (2,)


class TestInParts(StrategySuite):
    strategy = InParts


class TestCheckpointsInABuffer(CheckpointSuite):
    strategy = InABuffer
    worlds = (2,)


def summed(output, batch):
    return output.pow(2).sum(), len(batch)


@pytest.mark.parametrize("steps", [1, 3])
def test_a_step_follows_a_window_that_the_strategy_runs_by_itself(steps):
    accelerator = Accelerator(strategy=RunsWindows(), cpu=True, gradient_accumulation_steps=steps)
    model = nn.Linear(2, 1, bias=False)
    nn.init.ones_(model.weight)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    accelerator.forward_backward(model, [torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 0.0]])], summed)
    optimizer.step()
    torch.testing.assert_close(accelerator.unwrap_model(model).weight.detach(), torch.tensor([[-0.2, 0.4]]))
