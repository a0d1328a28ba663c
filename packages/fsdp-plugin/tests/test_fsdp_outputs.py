"""What units return may be changed in place: it is a view of nothing, and the engine still hears of its gradient."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from accel_core import Accelerator
from accel_fsdp import FSDP
from accel_testing import run_ranks


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return {"out": self.linear(x), "count": 3}


class Residual(nn.Module):
    """Adds in place to what its blocks return: views, as a linear layer with a bias makes them of three dims."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        for block in self.blocks:
            out = block(x)["out"]
            out += x
            x = torch.tanh(out)
        return self.head(x)


def built():
    torch.manual_seed(0)
    return Residual()


def data():
    return torch.linspace(-1, 1, 24).view(2, 3, 4)


def trained():
    accelerator = Accelerator(strategy=FSDP(), cpu=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = accelerator.prepare(built())
        output = model(data())
        output *= 2
        accelerator.backward(output.pow(2).mean())
        whole = [parameter.grad.full_tensor().tolist() for parameter in model.parameters()]
    return whole, [str(each.message) for each in caught]


@pytest.fixture(scope="module")
def ranks():
    return run_ranks(trained, 2, timeout=60)


def test_gradients_are_those_of_one_process(ranks):
    model = built()
    (2 * model(data())).pow(2).mean().backward()
    for gradients, _ in ranks:
        for gradient, parameter in zip(gradients, model.parameters(), strict=True):
            torch.testing.assert_close(torch.tensor(gradient), parameter.grad)


def test_nobody_is_warned_of_views(ranks):
    assert [said for _, said in ranks] == [[], []]
