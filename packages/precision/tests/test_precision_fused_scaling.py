"""Loss scaling of fused optimizers, whose kernels unscale and leave steps out: nothing is awaited, and nothing else differs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR

from accel_core import Accelerator
from accel_precision import FP16, GradScalerKwargs
from accel_testing.waits import Waits

OVERFLOW = 1e38
FACTORS = (1.0, OVERFLOW, 1.0, 1.0, OVERFLOW, OVERFLOW, 1.0)
OPTIMIZERS = [
    lambda given: torch.optim.AdamW(given, lr=0.1, fused=True),
    lambda given: torch.optim.SGD(given, lr=0.1, momentum=0.9, fused=True),
]


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def rows() -> torch.Tensor:
    return torch.randn(8, 3, generator=torch.Generator().manual_seed(1))


class Reads(Waits):
    """Whatever reads a number: on a CPU nothing waits, but the same operators do so on a device."""

    def _waits(self, func: Any, args: Any, kwargs: Any, result: Any) -> bool:
        return func.overloadpacket.__name__ == "_local_scalar_dense"


def by_torch(build: Any, clip: float | None) -> tuple[list[torch.Tensor], list[float]]:
    """torch's own scaler in a plain loop: the weights at the end, and the scale before each step."""
    model = net()
    optimizer, scaler, scales = build(model.parameters()), torch.amp.GradScaler("cpu", init_scale=65536.0), []
    for factor in FACTORS:
        scaler.scale(model(rows()).pow(2).mean() * factor).backward()
        scales.append(scaler.get_scale())
        if clip is not None:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return list(model.parameters()), scales


def prepared(build: Any, **options: Any) -> tuple[Accelerator, FP16, nn.Module, Any]:
    precision = FP16(output_dtype=None, **options)
    object.__setattr__(precision.policy, "compute", None)
    accelerator, model = Accelerator(mixed_precision=precision), net()
    model, optimizer = accelerator.prepare(model, build(model.parameters()))
    return accelerator, precision, model, optimizer


@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("build", OPTIMIZERS, ids=["AdamW", "SGD"])
def test_a_fused_optimizer_trains_as_under_the_scaler_of_torch(build: Any, clip: float | None) -> None:
    accelerator, precision, model, optimizer = prepared(build, init_scale=65536.0)
    scales, skipped = [], []
    for factor in FACTORS:
        accelerator.backward(model(rows()).pow(2).mean() * factor)
        scales.append(precision.scaling.value)
        if clip is not None:
            accelerator.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        assert not hasattr(optimizer, "found_inf")
        optimizer.zero_grad()
        skipped.append(accelerator.optimizer_step_was_skipped)
    expected, scales_of_torch = by_torch(build, clip)
    assert skipped == [factor == OVERFLOW for factor in FACTORS]
    assert scales == scales_of_torch
    for found, wanted in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)


def reads(fused: bool) -> list[str]:
    """What a step reads, of the scaling and of the optimizer itself."""
    accelerator, _, model, optimizer = prepared(lambda given: torch.optim.SGD(given, lr=0.1, fused=fused))
    for _ in range(3):
        with Reads() as waits:
            accelerator.backward(model(rows()).pow(2).mean())
            optimizer.step()
            optimizer.zero_grad()
    return waits.names


def test_nothing_is_read_in_a_step_of_a_fused_optimizer() -> None:
    assert reads(fused=False) == ["_local_scalar_dense"]
    assert reads(fused=True) == []


def test_a_schedule_is_held_back_by_a_step_that_the_kernels_left_out() -> None:
    accelerator, _, model, optimizer = prepared(OPTIMIZERS[0])
    scheduler = accelerator.prepare(StepLR(optimizer, 1, gamma=0.5))
    rates = []
    for factor in (OVERFLOW, 1.0):
        accelerator.backward(model(rows()).pow(2).mean() * factor)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        rates += scheduler.get_last_lr()
        assert bool(optimizer.step_was_skipped) is (factor == OVERFLOW)
    assert rates == [0.1, 0.05]


def test_an_optimizer_that_takes_the_scaler_as_an_argument_is_given_unscaled_gradients() -> None:
    class Older(torch.optim.SGD):
        def step(self, closure: Any = None, grad_scaler: Any = None) -> Any:
            assert grad_scaler is None
            return super().step(closure)

    def build(given: Any) -> torch.optim.Optimizer:
        optimizer = Older(given, lr=0.1)
        optimizer._step_supports_amp_scaling = True
        return optimizer

    accelerator, _, model, optimizer = prepared(build, init_scale=1024.0)
    accelerator.backward(model(rows()).pow(2).mean())
    optimizer.step()
    plain = net()
    plain(rows()).pow(2).mean().backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    for found, wanted in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found, wanted)


def test_growth_counts_steps_of_fused_optimizers() -> None:
    accelerator, precision, model, optimizer = prepared(OPTIMIZERS[1], init_scale=8.0, growth_interval=2)
    assert isinstance(precision.scaling.options, GradScalerKwargs)
    for _ in range(4):
        accelerator.backward(model(rows()).pow(2).mean())
        optimizer.step()
        optimizer.zero_grad()
    assert precision.scaling.state_dict()["scale"] == 32.0
