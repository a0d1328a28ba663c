"""What a configuration adds to ZeRO trains as one process does; what needs an accelerator is refused on every rank."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from accel_core import Accelerator
from accel_deepspeed import DeepSpeed
from accel_testing import run_ranks

WORLD, STEPS = 2, 3
QUANTISED = ("zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients")


class Experts(nn.Module):
    """Of which each call uses one."""

    def __init__(self):
        super().__init__()
        self.all = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.chosen = 0

    def forward(self, x):
        return self.all[self.chosen](x)


def built():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), Experts(), nn.Linear(4, 2))


def loss_of(model, inner, step, rank, chosen):
    inner[1].chosen = chosen(step, rank)
    return model(torch.linspace(-1, 1, 12).view(3, 4) + rank + step).square().mean()


def alike(step, rank):
    return step


def by_rank(step, rank):
    return (step + rank) % 3


def trained(chosen, **options):
    accelerator = Accelerator(strategy=DeepSpeed(zero_stage=3, **options), cpu=True)
    model = built()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    rank, inner = accelerator.process_index, accelerator.unwrap_model(model)
    for step in range(STEPS):
        accelerator.backward(loss_of(model, inner, step, rank, chosen))
        optimizer.step()
        optimizer.zero_grad()
    weights = accelerator.get_state_dict(model)
    accelerator.end_training()
    return weights


def everything():
    said = {}
    for key in QUANTISED:
        with pytest.raises(RuntimeError) as raised:
            trained(alike, config={"zero_optimization": {"stage": 3, key: True}})
        said[key] = str(raised.value)
    hierarchical = {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2}}
    weights = {
        "experts": trained(by_rank, moe_leaf_modules=["Experts"]),
        "hierarchical": trained(alike, config=hierarchical),
    }
    return weights, said


@pytest.fixture(scope="module")
def ranks():
    return run_ranks(everything, WORLD, timeout=110)


@pytest.mark.parametrize(("what", "chosen"), [("experts", by_rank), ("hierarchical", alike)])
def test_it_trains_as_one_process(ranks, what, chosen):
    model = built()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        for rank in range(WORLD):
            (loss_of(model, model, step, rank, chosen) / WORLD).backward()
        optimizer.step()
        optimizer.zero_grad()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(ranks[0][0][what][name], value)


@pytest.mark.parametrize("key", QUANTISED)
def test_quantised_communication_is_refused_without_an_accelerator(ranks, key):
    for _, said in ranks:
        assert "DeepSpeed has no operator 'quantizer' for this machine" in said[key]


def test_leaf_modules_that_the_model_lacks_are_refused():
    model = built()
    accelerator = Accelerator(strategy=DeepSpeed(zero_stage=3, moe_leaf_modules=["Expert"]), cpu=True)
    with pytest.raises(ValueError, match="moe_leaf_modules has 'Expert', but Sequential has no module of that class"):
        accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    accelerator.end_training()
