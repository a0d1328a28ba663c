"""Norms are as near as single precision allows at any size, and clipping does not round gradients of a lower precision again."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from accel_core import Accelerator
from accel_deepspeed import DeepSpeed, clipping
from accel_deepspeed.prepared_model import engine_of
from accel_testing import run_ranks

RATE, MAX_NORM = 0.5, 1e-3


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, math.inf])
@pytest.mark.parametrize("size", [0, 5, 1024, 2**23 + 7])
def test_norms_of_long_gradients_are_near_in_single_precision(size, norm_type):
    gradient = torch.rand(size, generator=torch.Generator().manual_seed(0))
    norm, _ = clipping.joint_norm([gradient], [], norm_type, torch.device("cpu"), None)
    expected = torch.linalg.vector_norm(gradient.double(), norm_type) if size else torch.zeros(())
    torch.testing.assert_close(norm.double(), expected.double(), rtol=2e-6, atol=0)


def measured(stage, looks):
    """This rank's masters before and after a step by clipped gradients; gradients before and, if somebody looks, after clipping."""
    torch.manual_seed(0)
    config = {"zero_optimization": {"stage": stage}, "bf16": {"enabled": True}}
    accelerator = Accelerator(strategy=DeepSpeed(config=config), cpu=True, mixed_precision="bf16")
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 1))
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=RATE))
    accelerator.backward(model(torch.linspace(-1, 1, 64).view(4, 16)).square().mean())
    engine = engine_of(model)
    masters = engine._partitions.masters
    before, gradients = [each.clone() for each in masters], [each.float() for each in engine.gradients()]
    norm = accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)
    factor = MAX_NORM / (norm + 1e-6)
    seen = [each.clone() for each in engine.gradients()] if looks else None
    optimizer.step()
    found = [each.clone() for each in masters]
    accelerator.free_memory()
    return before, gradients, factor, seen, found


def everything():
    return {(stage, looks): measured(stage, looks) for stage in (1, 2, 3) for looks in (False, True)}


@pytest.mark.parametrize("world", [1, 2])
def test_gradients_of_bfloat16_are_clipped_in_the_precision_of_the_masters(world):
    for facts in run_ranks(everything, world, timeout=110):
        for (stage, looks), (before, gradients, factor, seen, found) in facts.items():
            for master, gradient, after in zip(before, gradients, found, strict=True):
                exact = master - RATE * gradient * factor
                rounded = master - RATE * (gradient * factor).bfloat16().float()
                if master.numel() > 1:
                    assert not torch.allclose(exact, rounded, rtol=0, atol=1e-8), "the test cannot tell them apart"
                torch.testing.assert_close(
                    after, rounded if looks else exact, rtol=0, atol=6e-8, msg=f"{stage} {looks}"
                )
            if looks:  # whoever reads gradients sees what was clipped
                for gradient, one in zip(gradients, seen, strict=True):
                    torch.testing.assert_close(one, (gradient * factor).bfloat16(), rtol=1e-2, atol=1e-9)
