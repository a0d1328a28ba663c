"""One run, moved from strategy to strategy inside an epoch: single, xla, ddp, xla sharded, single."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("torch_xla") is None:  # it is not imported here, which would exchange torch's `new_group`
    pytest.skip("torch_xla fits another torch: nox -s xla", allow_module_level=True)

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from accel_core import Accelerator
from accel_testing import run_ranks
from accel_xla import XLA

WAIT = 300.0
STEPS, ROWS, EACH = 20, 8, 4


def run(kind: str, folder: str, begin: int, end: int) -> dict[str, torch.Tensor]:
    """Steps `begin` to `end`, of a checkpoint if there is one, saved at its end."""
    torch.manual_seed(0)
    strategy: Any = {"xla": XLA, "xla sharded": lambda: XLA(shard=-1)}.get(kind, lambda: None)()
    accelerator = Accelerator(strategy=strategy, cpu=strategy is None)
    x = torch.randn(STEPS * ROWS, 8, generator=torch.Generator().manual_seed(1))
    model: Any = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    optimizer: Any = torch.optim.AdamW(model.parameters(), 1e-2, eps=1e-3)
    scheduler: Any = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    loader: Any = DataLoader(TensorDataset(x, x[:, :4] ** 2), ROWS // accelerator.num_processes, shuffle=True)
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    if begin:
        accelerator.load_state(f"{folder}/{begin}")
    for step, (inputs, targets) in enumerate(loader, begin):
        accelerator.backward(F.mse_loss(model(inputs), targets))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if step + 1 == end:
            break
    accelerator.save_state(f"{folder}/{end}")
    state = {name: value.detach().cpu().clone() for name, value in accelerator.get_state_dict(model).items()}
    accelerator.end_training()
    return state


CHAIN = (("single", 1), ("xla", 1), ("ddp", 2), ("xla sharded", 1), ("single", 1))


@pytest.mark.timeout(600)
def test_chain_over_strategies_is_an_uninterrupted_run(tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    [expected] = run_ranks(run, 1, "single", str(tmp_path / "whole"), 0, STEPS, timeout=WAIT)
    found: dict[str, torch.Tensor] = {}
    for link, (kind, world) in enumerate(CHAIN):
        states = run_ranks(run, world, kind, str(tmp_path), link * EACH, (link + 1) * EACH, timeout=WAIT)
        found = states[0]
    assert max(float((found[name] - expected[name]).abs().max()) for name in expected) < 1e-5
