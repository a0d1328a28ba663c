"""A layer that runs several times, each time in a checkpoint of its own: gradients are whole, or the backward raises."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from accel_core import Accelerator
from accel_deepspeed import DeepSpeed
from accel_testing import run_ranks
from accel_testing.training import gradients_of

SMALL = 8
"""Elements in a bucket of gradients: less than a layer has, so that each parameter is sent by itself."""


class Repeated(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.first, self.again, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.reentrant = reentrant

    def forward(self, x):
        x = self.first(x)
        for _ in range(2):
            x = checkpoint(self.again, x.tanh(), use_reentrant=self.reentrant)
        return self.last(x)


def loss(model, rank):
    return model(torch.linspace(-1, 1, 12).view(3, 4) + rank).square().sum()


def built(reentrant=False):
    torch.manual_seed(0)
    return Repeated(reentrant)


def found_by(stage, reentrant):
    zero = {"stage": stage, "reduce_bucket_size": SMALL}
    accelerator = Accelerator(strategy=DeepSpeed(config={"zero_optimization": zero}), cpu=True)
    model = built(reentrant)
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    try:
        accelerator.backward(loss(model, accelerator.process_index))
        return gradients_of(accelerator, model)
    except RuntimeError as error:
        return str(error)
    finally:
        accelerator.free_memory()


def all_found():
    return {(stage, reentrant): found_by(stage, reentrant) for stage in (1, 2, 3) for reentrant in (True, False)}


@pytest.fixture(scope="module")
def ranks():
    return run_ranks(all_found, 2, timeout=120)


@pytest.mark.parametrize(("stage", "reentrant"), [(1, True), (1, False), (2, False), (3, False)])
def test_gradients_are_those_of_one_process(ranks, stage, reentrant):
    alone = built()
    for rank in range(2):
        (loss(alone, rank) / 2).backward()
    for rank in ranks:
        for name, parameter in alone.named_parameters():
            torch.testing.assert_close(rank[stage, reentrant][name], parameter.grad)


@pytest.mark.parametrize("stage", [2, 3])
def test_a_gradient_behind_the_one_that_was_sent_is_refused(ranks, stage):
    for rank in ranks:
        assert "got a gradient twice in one backward" in rank[stage, True]
        assert "Write use_reentrant=False" in rank[stage, True]
