"""Optimizers that update parameters during the backward: what works, and what says why it cannot."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from accel_core import Accelerator, Precision, PrecisionPolicy, Strategy, hookimpl, place_model
from accel_testing import run_ranks


class FusedSGD(torch.optim.Optimizer):
    """Plain SGD in hooks of the backward. The loss is scaled inside, as such optimizers do."""

    scale = 4.0

    def __init__(self, model: nn.Module, lr: float = 1.0) -> None:
        super().__init__(model.parameters(), {"lr": lr})
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(self._update)

    def fused_backward(self, loss: torch.Tensor, lr: float) -> None:
        self.param_groups[0]["lr"] = lr
        (loss * self.scale).backward()

    @torch.no_grad()
    def _update(self, parameter: nn.Parameter) -> None:
        parameter.add_(parameter.grad, alpha=-self.param_groups[0]["lr"] / self.scale)
        parameter.grad = None


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


BATCHES = torch.randn(6, 5, 3, generator=torch.Generator().manual_seed(1))


def by_hand(rates: list[float]) -> list[torch.Tensor]:
    model = net()
    for batch, rate in zip(BATCHES, rates, strict=False):
        model(batch).square().mean().backward()
        torch.optim.SGD(model.parameters(), lr=rate).step()
        model.zero_grad()
    return [parameter.detach() for parameter in model.parameters()]


def prepared(**options) -> tuple[Accelerator, nn.Module, FusedSGD]:
    accelerator = Accelerator(**options)
    model = net()
    return accelerator, *accelerator.prepare(model, FusedSGD(model))


def loss_of(model: nn.Module) -> torch.Tensor:
    return model(BATCHES[0]).square().mean()


@pytest.mark.parametrize("older_name", [False, True])
def test_the_usual_loop_trains(older_name) -> None:
    accelerator, model, optimizer = prepared()
    scheduler = accelerator.prepare(torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5))
    rates = []
    for batch in BATCHES:
        with accelerator.accumulate(model):
            loss = model(batch).square().mean()
            rates += scheduler.get_last_lr()
            if older_name:
                accelerator.lomo_backward(loss, rates[-1])
            else:
                accelerator.backward(loss, learning_rate=rates[-1])
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    assert rates == [1.0, 1.0, 0.5, 0.5, 0.25, 0.25]
    for parameter, expected in zip(model.parameters(), by_hand(rates), strict=True):
        torch.testing.assert_close(parameter.detach(), expected)


def test_a_learning_rate_without_such_an_optimizer_is_refused() -> None:
    accelerator = Accelerator()
    model = net()
    accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    with pytest.raises(TypeError, match="no prepared optimizer updates parameters during the backward; prepared: SGD"):
        accelerator.backward(loss_of(model), learning_rate=0.1)
    accelerator.free_memory()
    with pytest.raises(TypeError, match="prepared: none"):
        accelerator.lomo_backward(loss_of(model), 0.1)


def test_without_a_learning_rate_nothing_is_updated() -> None:
    accelerator, model, _ = prepared()
    with pytest.raises(
        TypeError,
        match=r"FusedSGD .* takes a loss and learning_rate=, such as scheduler\.get_last_lr\(\)\[0\], and no more",
    ):
        accelerator.backward(loss_of(model))


def test_other_arguments_of_the_backward_are_refused() -> None:
    accelerator, model, _ = prepared()
    with pytest.raises(TypeError, match=r"FusedSGD .* takes a loss and learning_rate=, .*, and no more"):
        accelerator.backward(loss_of(model), learning_rate=0.1, retain_graph=True)


def test_the_search_for_the_first_nan_is_refused_for_it() -> None:
    with pytest.raises(
        ValueError, match="FusedSGD updates parameters during the backward, so a window that went wrong"
    ):
        Accelerator(cpu=True, detect_nonfinite=True).prepare(FusedSGD(net()))


def test_beside_other_optimizers_a_loss_is_ambiguous() -> None:
    accelerator, model, _ = prepared()
    other = net()
    accelerator.prepare(other, torch.optim.SGD(other.parameters(), lr=1.0))
    for options in ({"learning_rate": 0.1}, {}):
        with pytest.raises(RuntimeError, match=r"one of several .*\(FusedSGD, SGD\).*an Accelerator of its own"):
            accelerator.backward(loss_of(model), **options)


def test_freed_it_is_forgotten() -> None:
    accelerator, model, optimizer = prepared()
    accelerator.free_memory()
    model = accelerator.prepare(net())
    accelerator.backward(loss_of(model))
    assert model[0].weight.grad is not None
    with pytest.raises(NotImplementedError):
        optimizer.step()  # its own again


def test_micro_batches_cannot_be_accumulated() -> None:
    accelerator, model, _ = prepared(gradient_accumulation_steps=2)
    with pytest.raises(RuntimeError, match="With gradient_accumulation_steps=2 nothing would be accumulated"):
        accelerator.backward(loss_of(model), learning_rate=0.1)


@pytest.mark.parametrize("call", [
    lambda accelerator, model: accelerator.clip_grad_norm_(model.parameters(), 1.0),
    lambda accelerator, model: accelerator.clip_grad_value_(model.parameters(), 1.0),
    lambda accelerator, model: accelerator.forward_backward(model, [BATCHES[0]], lambda output, _: (output.sum(), 5)),
])  # fmt: skip
def test_what_needs_gradients_says_that_they_are_gone(call) -> None:
    accelerator, model, _ = prepared()
    before = model[0].weight.detach().clone()
    with pytest.raises(
        RuntimeError, match=r"_\w*\(\) was called, but FusedSGD updates each parameter during the backward"
    ):
        call(accelerator, model)
    assert model[0].weight.equal(before)


def test_a_plain_backward_is_noticed_at_the_step() -> None:
    _, model, optimizer = prepared()
    loss_of(model).backward()
    with pytest.raises(RuntimeError, match="no accelerator.backward"):
        optimizer.step()


def test_a_closure_would_never_be_called() -> None:
    accelerator, model, optimizer = prepared()
    accelerator.backward(loss_of(model), learning_rate=0.1)
    with pytest.raises(
        TypeError, match=r"optimizer\.step\(closure\) was called, but this optimizer steps during the backward"
    ):
        optimizer.step(lambda: loss_of(model))


class Scaled(Precision):
    """Scales losses, and would unscale gradients."""

    @property
    def policy(self) -> PrecisionPolicy:
        return PrecisionPolicy()

    @hookimpl
    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        return loss * 8


class Engine(Strategy):
    @hookimpl
    def prepare_model(self, model, optimizers, request):
        place_model(model, request)
        return model

    @hookimpl
    def optimizer_step(self, optimizer, step):
        return step()


@pytest.mark.parametrize("options, hook", [
    ({"mixed_precision": Scaled()}, "scale_loss"),
    ({"strategy": Engine()}, "optimizer_step"),
])  # fmt: skip
def test_what_takes_part_in_the_loss_or_the_step_is_refused(options, hook) -> None:
    accelerator, model, _ = prepared(**options)
    with pytest.raises(
        RuntimeError, match=f"The hook '{hook}' is taken over by .*{__name__}.*mixed_precision='bf16' or 'no'"
    ):
        accelerator.backward(loss_of(model), learning_rate=0.1)


def drift() -> str:
    accelerator, model, _ = prepared()
    before = model.module[0].weight.detach().clone()
    try:
        accelerator.backward(loss_of(model), learning_rate=0.1)
    except RuntimeError as error:
        assert model.module[0].weight.equal(before)
        return str(error)
    return ""


def test_in_a_larger_world_the_ranks_would_drift_apart() -> None:
    for message in run_ranks(drift, 2):
        assert "In a world of 2 ranks gradients are averaged at the end of the backward, after the update" in message
