"""DeepSpeed's own compiled optimizers, prepared by a script, step as torch's AdamW does."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from accel_core import Accelerator
from accel_deepspeed import DeepSpeed
from accel_deepspeed.operators import build, examine
from accel_testing import run_ranks

WORLD, STEPS = 2, 3
KINDS = {"cpu_adam": ("DeepSpeedCPUAdam", "cpu"), "fused_adam": ("FusedAdam", None)}
"""By their operators, classes and where optimizer state is offloaded to."""


def built():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def loss_of(model, number):
    return model(torch.linspace(-1, 1, 12).view(3, 4) + number / 4).square().mean()


def prepared(operator, stage):
    from deepspeed.ops import adam

    name, offloaded = KINDS[operator]
    accelerator = Accelerator(strategy=DeepSpeed(zero_stage=stage, offload_optimizer=offloaded), cpu=True)
    model = built()
    optimizer = getattr(adam, name)(model.parameters(), lr=0.1, weight_decay=0.01)
    return accelerator, *accelerator.prepare(model, optimizer)


def stepped(accelerator, model, optimizer, loss):
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    return {key: each.clone() for key, each in accelerator.get_state_dict(model).items()}


def trained(folder, operator):
    found = {}
    for stage in (1, 2, 3):
        run = accelerator, model, _ = prepared(operator, stage)
        for number in range(STEPS):
            weights = stepped(*run, loss_of(model, number + accelerator.process_index))
        accelerator.save_state(folder / f"{operator} {stage}")
        after = stepped(*run, loss_of(model, STEPS + accelerator.process_index))
        accelerator.load_state(folder / f"{operator} {stage}")
        found[stage] = weights, after, stepped(*run, loss_of(model, STEPS + accelerator.process_index))
        accelerator.end_training()
    return found


def taken_over(folder, operator):
    """The step after those of two processes, by one."""
    found = {}
    for stage in (1, 2, 3):
        run = accelerator, model, _ = prepared(operator, stage)
        accelerator.load_state(folder / f"{operator} {stage}")
        found[stage] = stepped(*run, (loss_of(model, STEPS) + loss_of(model, STEPS + 1)) / WORLD)
        accelerator.end_training()
    return found


@pytest.mark.full
@pytest.mark.timeout(400)
@pytest.mark.parametrize("operator", KINDS)
def test_it_steps_and_goes_on_as_adamw(operator, tmp_path):
    if examine(operator).state == "impossible":
        pytest.skip(f"{operator} cannot be compiled: {examine(operator).place}")
    build(operator, print)
    model = built()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.01)
    for number in range(STEPS):
        for rank in range(WORLD):
            (loss_of(model, number + rank) / WORLD).backward()
        optimizer.step()
        optimizer.zero_grad()
    found = run_ranks(trained, WORLD, tmp_path, operator, timeout=150)[0]
    (alone,) = run_ranks(taken_over, 1, tmp_path, operator, timeout=150)
    for stage, (weights, after, again) in found.items():
        for key, value in model.state_dict().items():
            torch.testing.assert_close(weights[key], value, rtol=1e-4, atol=1e-5)
            assert torch.equal(again[key], after[key])
            torch.testing.assert_close(alone[stage][key], after[key], rtol=1e-4, atol=1e-5)
