"""A checkpoint in which parameters of one group were stepped unlike often: refused before anything is loaded."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from accel_core import Accelerator
from accel_deepspeed import DeepSpeed
from accel_testing import run_ranks


class Halves(nn.Module):
    """Two layers, of which one step uses the first alone."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x, both=True):
        return self.first(x) + self.second(x) if both else self.first(x)


def run(strategy, seed, apart=False):
    """An Accelerator with a model and an optimizer of one group, or of one for each layer."""
    accelerator = Accelerator(strategy=strategy, cpu=True)
    torch.manual_seed(seed)
    model = Halves()
    groups = [{"params": list(each.parameters())} for each in (model.first, model.second)]
    optimizer = torch.optim.AdamW(groups if apart else model.parameters(), lr=0.1)
    return accelerator, *accelerator.prepare(model, optimizer)


def step(accelerator, model, optimizer, both):
    accelerator.backward(model(torch.linspace(-1, 1, 8).view(2, 4), both).square().sum())
    optimizer.step()
    optimizer.zero_grad()


def save(folder):
    for apart in (False, True):
        accelerator, *trained = run("single", 0, apart)
        for both in (True, False):
            step(accelerator, *trained, both)
        accelerator.save_state(f"{folder}/{apart}")


def weights_of(accelerator, model):
    return {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}


def moments_of(optimizer):
    return [{key: value.clone() for key, value in each.items()} for each in optimizer.state.values()]


def load(folder, stage):
    """What loading says, and weights and the optimizer before and behind it; and the steps of groups that are apart."""
    accelerator, model, optimizer = run(DeepSpeed(zero_stage=stage), 1)
    step(accelerator, model, optimizer, True)
    before = weights_of(accelerator, model), moments_of(optimizer)
    said = ""
    try:
        accelerator.load_state(f"{folder}/False")
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    after = weights_of(accelerator, model), moments_of(optimizer)
    accelerator.free_memory()
    accelerator, model, optimizer = run(DeepSpeed(zero_stage=stage), 1, apart=True)
    accelerator.load_state(f"{folder}/True")
    steps = {
        name: float(optimizer.state[each]["step"]) for name, each in accelerator.unwrap_model(model).named_parameters()
    }
    accelerator.free_memory()
    return said, before, after, steps


def load_all(folder):
    return {stage: load(folder, stage) for stage in (1, 3)}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    run_ranks(save, 1, folder)
    return run_ranks(load_all, 2, folder)


@pytest.mark.parametrize("stage", [1, 3])
def test_it_is_refused_and_nothing_has_changed(ranks, stage):
    for rank in ranks:
        said, before, after, _ = rank[stage]
        assert "has step=2.0 for one parameter of Halves, and 1.0 for another one of the same group" in said
        torch.testing.assert_close(after, before, rtol=0, atol=0)


@pytest.mark.parametrize("stage", [1, 3])
def test_it_is_loaded_into_groups_of_their_own(ranks, stage):
    steps = {"first.weight": 2.0, "first.bias": 2.0, "second.weight": 1.0, "second.bias": 1.0}
    assert [rank[stage][-1] for rank in ranks] == [steps, steps]
