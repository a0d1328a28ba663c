"""Blocks in which ranks step by themselves: behind them, the loss scale is the same on all."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from accel_core import Accelerator, LocalSGD
from accel_precision import FP16
from accel_testing import run_ranks

BIG = 1e30  # a loss that overflows


def step(accelerator, model, optimizer, factor):
    accelerator.backward(model(torch.full((2, 2), 0.5)).float().mean() * factor)
    optimizer.step()
    optimizer.zero_grad()


def prepared():
    precision = FP16(init_scale=1024.0)
    accelerator = Accelerator(mixed_precision=precision, cpu=True)
    torch.manual_seed(0)
    model = nn.Linear(2, 2)
    return accelerator, precision, *accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))


def blocks():
    """The scale inside of each block, behind it, and the weights after a step that all take together."""
    found = {}
    accelerator, precision, model, optimizer = prepared()
    with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=8) as local:
        for number in range(2):
            overflows = accelerator.is_main_process and number == 0
            step(accelerator, model, optimizer, BIG if overflows else 1.0)
            local.step()
        inside = precision.state_dict()["scale"]
    step(accelerator, model, optimizer, 1.0)
    found["local"] = inside, precision.state_dict()["scale"], [each.tolist() for each in model.parameters()]

    accelerator, precision, model, optimizer = prepared()
    with accelerator.join_uneven_inputs([model]):
        for number in range(1 + accelerator.process_index):
            step(accelerator, model, optimizer, BIG if number == 1 else 1.0)
    behind = precision.state_dict()["scale"]
    step(accelerator, model, optimizer, 1.0)
    found["join"] = behind, precision.state_dict()["scale"], [each.tolist() for each in model.parameters()]
    return found


@pytest.fixture(scope="module")
def ranks():
    return run_ranks(blocks, 2, timeout=60)


def test_after_local_sgd_all_ranks_have_the_scale_of_the_first(ranks):
    assert [rank["local"][0] for rank in ranks] == [512.0, 1024.0]
    assert [rank["local"][1] for rank in ranks] == [512.0, 512.0]
    assert ranks[0]["local"][2] == ranks[1]["local"][2]


def test_after_uneven_inputs_all_ranks_have_the_scale_of_the_one_that_went_on(ranks):
    assert [rank["join"][0] for rank in ranks] == [512.0, 512.0]
    assert ranks[0]["join"][1:] == ranks[1]["join"][1:]
