"""Loss scaling under strategies that run windows, keep gradients, or step in a way of their own."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from accel_core import Accelerator, Strategy, hookimpl, place_model
from accel_core.api.layouts import Elementwise
from accel_precision import FP16

HUGE = 1e30  # a loss that overflows when it is scaled


class Alone(Strategy):
    """One process, in which models are placed."""

    replicates_parameters = True

    @hookimpl
    def prepare_model(self, model, request):
        place_model(model, request)
        return model


class RunsWindows(Alone):
    """One backward for the whole window."""

    @hookimpl
    def forward_backward(self, model, micro_batches, loss_fn, inputs, scale_loss):
        parts = []
        for batch in micro_batches:
            args, kwargs = inputs(batch)
            parts.append(loss_fn(model(*args, **kwargs), batch))
        mean = sum(loss for loss, _ in parts) / sum(weight for _, weight in parts)
        scale_loss(mean).backward()
        return mean.detach()


class Engine(Alone):
    """Keeps gradients in a list of its own, and steps in the place of the optimizer, by plain descent."""

    def __init__(self):
        self.kept, self.steps = {}, 0

    @hookimpl
    def backward(self, loss, weight, closes, options):
        (loss * weight).backward(**options)
        for each in self.models:
            for name, parameter in each.named_parameters():
                self.kept[name] = self.kept.get(name, 0) + parameter.grad
                parameter.grad = None

    @hookimpl
    def prepare_model(self, model, request):
        place_model(model, request)
        self.models = [model]
        return model

    @hookimpl
    def gradient_state(self):
        return {name: [Elementwise.whole(gradient)] for name, gradient in self.kept.items()}

    @hookimpl
    def apply_step(self, optimizer, step):
        self.steps += 1
        with torch.no_grad():
            for name, parameter in self.models[0].named_parameters():
                parameter -= optimizer.param_groups[0]["lr"] * self.kept[name]


def prepared(strategy, **options):
    accelerator = Accelerator(strategy=strategy, mixed_precision=FP16(init_scale=1024.0), cpu=True, **options)
    model = nn.Linear(2, 1, bias=False)
    nn.init.ones_(model.weight)
    return accelerator, *accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))


def test_losses_are_scaled_in_a_window_that_the_strategy_runs_by_itself():
    accelerator, model, optimizer = prepared(RunsWindows(), gradient_accumulation_steps=2)
    batches = [torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 0.0]])]
    for factor, skipped, weight in ((1.0, False, [[0.0, 0.5]]), (HUGE, True, [[0.0, 0.5]])):

        def summed(output, batch, factor=factor):
            return output.float().sum() * factor, len(batch)

        accelerator.forward_backward(model, batches, summed)
        assert model.weight.grad.flatten().tolist() == [2048.0, 1024.0] or skipped
        optimizer.step()
        optimizer.zero_grad()
        assert accelerator.optimizer_step_was_skipped is skipped
        assert model.weight.tolist() == weight


@pytest.mark.parametrize("asked", ["unscale_gradients", "clip_grad_norm_", None])
def test_gradients_that_an_engine_keeps_are_unscaled_before_it_steps_and_an_overflow_is_seen(asked):
    strategy = Engine()
    accelerator, model, optimizer = prepared(strategy, gradient_accumulation_steps=2)
    for factor, weight in ((1.0, [[0.0, 0.5]]), (HUGE, [[0.0, 0.5]]), (1.0, [[-1.0, 0.0]])):
        for batch in (torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 0.0]])):
            with accelerator.accumulate(model):
                accelerator.backward(model(batch).float().sum() * factor)
                if asked == "unscale_gradients":
                    accelerator.unscale_gradients()
                elif asked is not None:
                    norm = accelerator.clip_grad_norm_(model.parameters(), 1e6)
                optimizer.step()
                optimizer.zero_grad()
        if asked == "clip_grad_norm_":
            assert norm.item() == pytest.approx(5**0.5) or factor == HUGE
        assert accelerator.optimizer_step_was_skipped is (factor == HUGE)
        assert model.weight.tolist() == weight
    assert strategy.steps == 2


def test_gradients_that_wait_for_another_optimizer_are_brought_to_the_new_scale():
    strategy = Engine()
    accelerator, model, optimizer = prepared(strategy)
    other = accelerator.prepare(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1))
    accelerator.backward(model(torch.tensor([[1.0, 2.0]])).float().sum())
    other.param_groups[0]["params"][0].grad = torch.tensor([torch.inf])
    accelerator.unscale_gradients(other)
    other.step()
    assert accelerator.optimizer_step_was_skipped
    accelerator.backward(model(torch.tensor([[1.0, 2.0]])).float().sum() * 0)
    accelerator.unscale_gradients(optimizer)
    assert strategy.kept["weight"].tolist() == [[1.0, 2.0]]


def test_a_closure_is_refused_where_an_engine_steps():
    accelerator, model, optimizer = prepared(Engine())
    accelerator.backward(model(torch.ones(1, 2)).float().sum())
    with pytest.raises(RuntimeError, match="called with arguments under loss scaling"):
        optimizer.step(lambda: 0.0)
