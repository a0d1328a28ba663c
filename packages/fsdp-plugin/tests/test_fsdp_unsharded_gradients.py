"""Parameters that stay whole: their gradients travel once, at the end of a backward, and are the mean."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from accel_core import Accelerator
from accel_fsdp import FSDP
from accel_testing import run_ranks

WIDTH = 4096
# How often the layer that stays whole is used by rank 0 and by rank 1, step by step.
USES = [(1, 1), (1, 1), (1, 0), (1, 1), (1, 1), (0, 0), (2, 2), (2, 2)]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.wide = nn.Linear(8, 8 * WIDTH)

    def forward(self, x, uses):
        for block in self.blocks:
            x = torch.tanh(block(x))
        total = x.sum(1)
        if uses:
            total = total + self.wide(x).square().mean(1)
        if uses > 1:  # each time, the gradient is added by a backward of its own
            total = total + checkpoint(lambda x: self.wide(x).sum(1), x, use_reentrant=True)
        return total


def inputs(rank, step):
    return torch.linspace(-1, 1, 24).view(3, 8) + rank - 0.1 * step


def train():
    """Of each step, what was sent and when units were done, and the gradients of the whole layer."""
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    events, patch = [], pytest.MonkeyPatch()
    reduce, post_backward = dist.all_reduce, FSDPParamGroup.post_backward

    def noted_reduce(tensor, *args, **kwargs):
        if tensor.numel() >= 8 * WIDTH:
            events.append("sent")
        return reduce(tensor, *args, **kwargs)

    def noted_end(self, *args):
        events.append(self._module_fqn)
        return post_backward(self, *args)

    accelerator = Accelerator(strategy=FSDP(ignored_modules=["wide"]), cpu=True)
    model = Model()
    optimizers = [torch.optim.AdamW(each.parameters()) for each in (model, model.blocks)]
    model, *optimizers = accelerator.prepare(model, *optimizers)
    kinds = [optimizer.param_groups[0]["foreach"] for optimizer in optimizers]
    patch.setattr(dist, "all_reduce", noted_reduce)
    patch.setattr(FSDPParamGroup, "post_backward", noted_end)
    found = []
    for step, uses in enumerate(USES):
        events.clear()
        model.zero_grad()
        rank = accelerator.process_index
        accelerator.backward(model(inputs(rank, step), uses[rank]).mean())
        found.append((list(events), model.wide.weight.grad.clone(), model.wide.bias.grad.clone()))
    model.zero_grad()
    events.clear()
    with accelerator.no_sync(model):
        accelerator.backward(model(inputs(rank, 0), 1).mean())
    held = "sent" in events
    accelerator.backward(model(inputs(rank, 0), 1).mean())
    patch.undo()
    return found, (held, model.wide.weight.grad.clone()), kinds


def mean(step):
    """The gradients of the whole layer, the mean over the ranks."""
    model = Model()
    for rank in range(2):
        (model(inputs(rank, step), USES[step][rank]).mean() / 2).backward()
    layer = model.wide
    return [torch.zeros_like(each) if each.grad is None else each.grad for each in (layer.weight, layer.bias)]


@pytest.fixture(scope="module")
def ranks():
    return run_ranks(train, 2, timeout=60)


@pytest.mark.parametrize("step", range(len(USES)))
def test_gradients_are_the_mean_whoever_used_the_layer(ranks, step):
    for steps, *_ in ranks:
        for found, expected in zip(steps[step][1:], mean(step), strict=True):
            torch.testing.assert_close(found, expected)


def test_gradients_travel_once_at_the_end_whoever_used_the_layer(ranks):
    """Behind every unit's: collectives of two communicators in unlike order can hang where the device runs them one by one."""
    for steps, *_ in ranks:
        for events, *_ in steps:
            assert events.count("sent") == 1
            assert events.index("sent") > events.index("blocks.0")


def test_what_a_backward_without_sync_held_back_travels_with_the_next(ranks):
    for _, (held, gradient), _ in ranks:
        assert not held
        torch.testing.assert_close(gradient, 2 * mean(0)[0])


def test_optimizers_step_one_by_one_what_torch_cannot_step_together(ranks):
    for _, _, kinds in ranks:
        assert kinds == [False, None]  # of whole ones and parts; of parts alone
