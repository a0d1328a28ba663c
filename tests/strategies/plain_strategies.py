"""Data parallelism, written down as plainly as the conformance suite allows: what toy strategies of the tests build on."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext

import torch
import torch.distributed as dist
from torch import nn

from accel_core import Layout, Shard, Strategy, hookimpl, place_model


class Wrapper(nn.Module):
    """Notes where a forward ran."""

    def __init__(self, module):
        super().__init__()
        self.module = module
        self.held_back = self.due = False
        self.reduce = None

    def forward(self, *args, **kwargs):
        if torch.is_grad_enabled():
            self.due = not self.held_back
        return self.module(*args, **kwargs)


class PlainStrategy(Strategy):
    """Averages after each backward whose forward ran outside `no_sync`."""

    replicates_parameters = True

    def __init__(self):
        self.world = None
        self.wrappers = []

    @hookimpl
    def layout(self, world):
        self.world = world
        return Layout(self.shard(world))

    @hookimpl
    def prepare_model(self, model, optimizers, request):
        self.place(model, request)
        if request.evaluation or not any(parameter.requires_grad for parameter in model.parameters()):
            return self.untrained(model)
        self.share(model)
        wrapper = self.wrap(model, optimizers)
        wrapper.reduce = request.policy.reduce
        self.wrappers.append(wrapper)
        return wrapper

    @hookimpl
    def no_sync(self, model):
        return self.holding_back(model) if isinstance(model, Wrapper) else nullcontext()

    @hookimpl
    def trigger_sync_in_backward(self, model):
        model.due = True
        return nullcontext()

    @hookimpl
    def backward(self, loss, weight, closes, options):
        (loss * weight).backward(**options)
        for wrapper in self.wrappers:
            if wrapper.due:
                self.average(wrapper)

    def shard(self, world):
        return Shard(world.rank, world.size)

    def place(self, model, request):
        place_model(model, request)

    def untrained(self, model):
        return model

    def share(self, model):
        for tensor in (*model.parameters(), *model.buffers()):
            dist.broadcast(tensor.data, src=0)

    def wrap(self, model, optimizers):
        return Wrapper(model)

    @contextmanager
    def holding_back(self, wrapper):
        before, wrapper.held_back = wrapper.held_back, True
        try:
            yield
        finally:
            wrapper.held_back = before

    def average(self, wrapper):
        for parameter in wrapper.parameters():
            if parameter.grad is not None:
                gradient = parameter.grad.to(wrapper.reduce or parameter.grad.dtype)
                dist.all_reduce(gradient)
                parameter.grad.copy_(gradient / self.world.size)
