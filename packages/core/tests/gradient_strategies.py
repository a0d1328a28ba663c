"""Strategies that are right, and do one thing in a way of their own that the core has to know of.

They build on the plain data parallelism of `wrong_strategies`, and work in a world of one too.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from wrong_strategies import Right

from accel_core.hookspecs import hookimpl


class Plain(Right):
    """Data parallelism, in a world of one too."""

    def share(self, model):
        if self.world.size > 1:
            super().share(model)

    def average(self, wrapper):
        if self.world.size > 1:
            super().average(wrapper)


class RunsWindows(Plain):
    """Runs a whole window by itself, as a pipeline does: every forward, and then one backward for all of them."""

    @hookimpl
    def forward_backward(self, model, micro_batches, loss_fn, inputs, scale_loss):
        parts = []
        for batch in micro_batches:
            args, kwargs = inputs(batch)
            parts.append(loss_fn(model(*args, **kwargs), batch))
        loss = sum(loss for loss, _ in parts)
        total = torch.tensor([float(loss.detach()), float(sum(weight for _, weight in parts))], dtype=torch.float64)
        if self.world.size > 1:
            dist.all_reduce(total)
        before = [(each, each.grad) for each in model.parameters()]
        for parameter, _ in before:
            parameter.grad = None
        scale_loss(loss * (self.world.size / float(total[1]))).backward()
        self.average(model)
        for parameter, gradient in before:
            if gradient is not None:
                parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        return (total[0] / total[1]).float()
