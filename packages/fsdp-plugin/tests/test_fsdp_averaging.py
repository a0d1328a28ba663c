"""A copy of the model that a library has made before `prepare` follows it, and goes into checkpoints."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from accel_core import Accelerator
from accel_testing import run_ranks

BATCH = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))


def averaged(model):
    return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5), use_buffers=True)


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 7), nn.LayerNorm(7), nn.Linear(7, 3))  # rows that no two ranks share evenly


def step(model, optimizer, copied, backward=torch.Tensor.backward):
    backward(model(BATCH).square().mean())
    optimizer.step()
    optimizer.zero_grad()
    copied.update_parameters(model)
    with torch.no_grad():
        return copied(BATCH).clone()


def plain(steps):
    model = net()
    copied, optimizer = averaged(model), torch.optim.AdamW(model.parameters(), lr=0.1)
    return [step(model, optimizer, copied) for _ in range(steps)]


def prepared(strategy):
    accelerator = Accelerator(cpu=True, strategy=strategy)
    model = net()
    copied, optimizer = averaged(model), torch.optim.AdamW(model.parameters(), lr=0.1)
    return accelerator, *accelerator.prepare(model, optimizer, copied)


def follows(folder, strategy):
    """What the copy gives in two steps, and in two more after the run has been resumed in other objects."""
    accelerator, model, optimizer, copied = prepared(strategy)
    outputs = [step(model, optimizer, copied, lambda loss: accelerator.backward(loss)) for _ in range(2)]
    accelerator.save_state(folder)
    accelerator.free_memory()
    accelerator, model, optimizer, copied = prepared(strategy)
    accelerator.load_state(folder)
    assert copied.n_averaged == 2
    return outputs + [step(model, optimizer, copied, lambda loss: accelerator.backward(loss)) for _ in range(2)]


@pytest.mark.parametrize("strategy, world", [("single", 1), ("ddp", 2), ("fsdp", 1), ("fsdp", 2)])
def test_a_copy_that_was_made_before_prepare_follows_the_model(strategy: str, world: int, tmp_path: Path) -> None:
    for outputs in run_ranks(partial(follows, tmp_path / "checkpoint", strategy), world):
        for found, wanted in zip(outputs, plain(4), strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
