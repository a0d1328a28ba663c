"""Loss scaling under strategies that run windows, keep gradients, or step in a way of their own."""

from __future__ import annotations

import torch
from torch import nn

from accel_core import Accelerator, Strategy, hookimpl, place_model
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
