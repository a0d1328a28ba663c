"""Strategies that are right, and do one thing in a way of their own that the core has to know of.

They build on the plain data parallelism of `plain_strategies`, and work in a world of one too.
"""

from __future__ import annotations

import math
from itertools import accumulate

import torch
import torch.distributed as dist
from plain_strategies import PlainStrategy, Wrapper
from torch import nn

from accel_checkpoint import (
    Extent,
    capture_model,
    capture_optimizer,
    flat_range,
    list_misfits,
    pieces_of,
    restore_optimizer,
)
from accel_core import hookimpl
from accel_core.api.layouts import Box, Elementwise, Partial


class Plain(PlainStrategy):
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


class Buffer:
    """The gradients of one model in single precision, laid end to end, of which this rank keeps the elements from `low` to `high`.

    Args:
        world: the processes.
        model: the user's.
        in_parts: whether a rank keeps a part of them.
    """

    def __init__(self, world, model, in_parts):
        self.world = world
        self.named = {name: each for name, each in model.named_parameters() if each.requires_grad}
        self.starts = dict(
            zip(self.named, accumulate((each.numel() for each in self.named.values()), initial=0), strict=False)
        )
        total = sum(each.numel() for each in self.named.values())
        width = math.ceil(total / world.size) if in_parts else total
        self.total = width * (world.size if in_parts else 1)  # with padding
        self.low = width * world.rank if in_parts else 0
        self.high = self.low + width
        self.kept = torch.zeros(width)

    def span(self, name):
        """Which elements of a parameter are kept here."""
        first, size = self.starts[name], self.named[name].numel()
        start, stop = max(self.low, first), min(self.high, first + size)
        return (start - first, stop - first) if start < stop else (0, 0)

    def part(self, name, flat):
        """What belongs to a parameter, of a flat tensor that is laid out like what is kept."""
        start, stop = self.span(name)
        return flat[self.starts[name] + start - self.low :][: stop - start]

    def boxes(self, name):
        return tuple(flat_range(tuple(self.named[name].shape), *self.span(name)))

    def laid_end_to_end(self, tensors):
        flat = torch.cat([tensor.detach().reshape(-1).float() for tensor in tensors])
        return nn.functional.pad(flat, (0, self.total - flat.numel()))

    def average(self, reduce):
        """Adds the mean of `.grad` over the ranks to what is kept, and clears it."""
        parameters = self.named.values()
        sent = self.laid_end_to_end(torch.zeros_like(each) if each.grad is None else each.grad for each in parameters)
        if self.world.size > 1:
            sent = sent.to(reduce or sent.dtype)
            dist.all_reduce(sent)
            sent = sent.div_(self.world.size)
        self.kept += sent[self.low : self.high]
        for parameter in parameters:
            parameter.grad = None

    def whole(self, flat):
        """What all ranks keep, by name. A collective, if they keep parts."""
        if self.high - self.low < self.total:
            parts = [torch.empty_like(flat) for _ in range(self.world.size)]
            dist.all_gather(parts, flat)
            flat = torch.cat(parts)
        places = ((name, each, self.starts[name]) for name, each in self.named.items())
        return {name: flat[start : start + each.numel()].view(each.shape) for name, each, start in places}


class InABuffer(Plain):
    """Keeps the mean of gradients in a buffer of its own; `.grad` has what has not travelled, and nothing else."""

    in_parts = False

    def __init__(self):
        super().__init__()
        self.buffers = {}  # by wrapper

    def wrap(self, model, optimizers):
        wrapper = Wrapper(model)
        self.buffers[wrapper] = Buffer(self.world, model, self.in_parts)
        return wrapper

    def average(self, wrapper):
        self.buffers[wrapper].average(wrapper.reduce)

    @hookimpl
    def gradient_state(self, model, prepared):
        buffer, state = self.buffers.get(prepared), {}
        for name, parameter in model.named_parameters() if buffer is not None else ():
            waiting = [] if parameter.grad is None else [Partial(parameter.grad)]
            if name in buffer.named:
                pieces = tuple(pieces_of(buffer.boxes(name), buffer.part(name, buffer.kept)))
                state[name] = [Elementwise(tuple(parameter.shape), torch.float32, pieces), *waiting]
        return state

    @hookimpl
    def apply_step(self, optimizer, step):
        held = {id(each) for group in optimizer.param_groups for each in group["params"]}
        lent = []
        for buffer in self.buffers.values():
            for name, gradient in buffer.whole(buffer.kept).items():
                parameter = buffer.named[name]
                if id(parameter) in held:
                    lent.append((parameter, parameter.grad))
                    parameter.grad = gradient.to(parameter.dtype)
        result = step()
        for parameter, gradient in lent:
            parameter.grad = gradient
        return result


class InParts(InABuffer):
    """Keeps a part of the mean on each rank: a range of the flat buffer, which begins and ends inside of parameters."""

    in_parts = True

    @hookimpl
    def clip_gradients(self, parameters, max_norm, norm_type):
        if norm_type == float("inf"):
            raise ValueError("norm_type has to be finite: a sum over ranks gives no maximum.")
        wanted, found = set(map(id, parameters)), []
        for buffer in self.buffers.values():
            for name, parameter in buffer.named.items():
                if id(parameter) in wanted:
                    found.append(buffer.part(name, buffer.kept))
        power = torch.stack([gradient.pow(norm_type).sum() for gradient in found]).sum()
        if self.world.size > 1:
            dist.all_reduce(power)
        norm = power ** (1 / norm_type)
        for gradient in found if max_norm < norm else ():
            gradient.mul_(max_norm / (norm + 1e-6))
        return norm


class Engine(InParts):
    """Steps in the optimizer's place: masters in single precision, and the optimizer's state, lie in flat memory in parts.

    The user's optimizer keeps the user's parameters; one of the same class, with the same options, steps this rank's fragments of
    the masters, and has its state in the user's.
    """

    replicates_parameters = False

    def __init__(self):
        super().__init__()
        self.masters = {}  # by buffer
        self.fragments = {}  # by the id of a user's parameter: its buffer, its name, and the parameter that is stepped
        self.inner = {}  # by the user's optimizer
        self.memory = {}  # by buffer and key: the state that was loaded

    def wrap(self, model, optimizers):
        wrapper = super().wrap(model, optimizers)
        buffer = self.buffers[wrapper]
        master = buffer.laid_end_to_end(buffer.named.values())[buffer.low : buffer.high].clone()
        self.masters[buffer] = master
        for name, parameter in buffer.named.items():
            self.fragments[id(parameter)] = buffer, name, nn.Parameter(buffer.part(name, master))
        return wrapper

    def stepped(self, optimizer):
        """The user's parameters in an optimizer that are stepped here, by group."""
        return [[each for each in group["params"] if id(each) in self.fragments] for group in optimizer.param_groups]

    def inner_of(self, optimizer):
        groups = self.stepped(optimizer)
        if optimizer not in self.inner:
            fragments = [{"params": [self.fragments[id(each)][2] for each in group]} for group in groups]
            self.inner[optimizer] = type(optimizer)(fragments, lr=0.1)
        inner = self.inner[optimizer]
        for group, own in zip(optimizer.param_groups, inner.param_groups, strict=True):
            own.update({key: value for key, value in group.items() if key != "params"})
        return inner

    @hookimpl
    def apply_step(self, optimizer, step):
        inner, parameters = self.inner_of(optimizer), [each for group in self.stepped(optimizer) for each in group]
        for buffer, name, fragment in (self.fragments[id(each)] for each in parameters):
            fragment.grad = buffer.part(name, buffer.kept)
        result = inner.step()
        optimizer._opt_called = True  # by which schedulers know
        optimizer.state.update({each: inner.state[self.fragments[id(each)][2]] for each in parameters})
        self.send(parameters)
        return result

    @torch.no_grad()
    def send(self, parameters):
        """Gives parameters the values of their masters on all ranks. A collective."""
        wanted = set(map(id, parameters))
        for buffer, master in self.masters.items():
            if wanted & set(map(id, buffer.named.values())):
                for name, value in buffer.whole(master).items():
                    if id(buffer.named[name]) in wanted:
                        buffer.named[name].copy_(value)

    @hookimpl
    def model_state(self, model):
        return capture_model(model, Fragments(self))

    @hookimpl
    def model_loaded(self, model):
        self.send(list(model.parameters()))

    @hookimpl
    def optimizer_state(self, optimizer, names):
        return capture_optimizer(optimizer, names, Fragments(self))

    @hookimpl
    def optimizer_misfits(self, optimizer, names, saved):
        return list_misfits(optimizer, names, Fragments(self), saved)

    @hookimpl
    def load_optimizer_state(self, optimizer, names, saved):
        restore_optimizer(optimizer, names, Fragments(self), saved)
        inner = self.inner_of(optimizer)
        inner.state.clear()
        inner.state.update({self.fragments[id(each)][2]: state for each, state in optimizer.state.items()})


class Fragments:
    """The `Sharding` of an engine: of each parameter a flat fragment, in memory that the engine keeps."""

    def __init__(self, engine):
        self.engine = engine

    def extent(self, parameter):
        shape = tuple(parameter.shape)
        if id(parameter) not in self.engine.fragments:
            return Extent(shape, (Box.whole(shape),))
        buffer, name, _ = self.engine.fragments[id(parameter)]
        return Extent(shape, buffer.boxes(name))

    def local(self, value):
        return (self.engine.fragments[id(value)][2] if id(value) in self.engine.fragments else value).detach()

    def like(self, parameter, local):
        return local

    def empty(self, parameter, key, dtype):
        buffer, name, _ = self.engine.fragments[id(parameter)]
        place = self.engine.memory.setdefault((buffer, key), torch.zeros(buffer.high - buffer.low, dtype=dtype))
        return buffer.part(name, place)

    def versioned(self, value):
        return False
