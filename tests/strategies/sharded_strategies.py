"""Strategies that train right and hold masters and optimizer state in shards, each cut in another way.

They are there for the checkpoint: what one of them saves, any other has to be able to load. The model keeps whole parameters
to compute with, whose gradients are averaged; an optimizer holds *masters* in their place, of which every rank has another part,
steps them, and the new masters are gathered into the whole parameters. So memory for optimizer state is shared out, as under
ZeRO-1.

All of them lay parameters end to end in *buckets* and cut each bucket at one place per rank. With one parameter per bucket and
cuts between its rows that is FSDP2's way (`Rows`), or an uneven one (`Uneven`); with all parameters of a group in one bucket it
is DeepSpeed's, where a rank's part begins and ends inside of parameters (`Flat`).
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from accel_checkpoint import (
    COUNTER,
    ELEMENTWISE,
    OF_THIS_PROCESS,
    REPLICATED,
    Extent,
    capture_model,
    capture_optimizer,
    flat_range,
    kind_of,
    layouts_of,
    list_misfits,
    pieces_of,
    restore_optimizer,
)
from accel_core import CheckpointError, Layout, Strategy, hookimpl, place_model
from accel_core.api.checkpoint import OptimizerState
from accel_core.api.layouts import Box, Elementwise, Piece, Replicated
from accel_core.api.strategy import gate_of


class Wrapper(nn.Module):
    """Notes where a forward ran, and shows the masters of its module as parameters of a prepared model."""

    def __init__(self, module, reduce):
        super().__init__()
        self.module = module
        self.masters = nn.ParameterList()
        self.reduce = reduce  # the dtype in which gradients travel; None: their own
        self.held_back = self.due = False

    def forward(self, *args, **kwargs):
        if torch.is_grad_enabled():
            self.due = not self.held_back
        return self.module(*args, **kwargs)


class Bucket:
    """Whole parameters, laid end to end, of which a rank owns the elements from one cut to the next.

    Args:
        world: the processes.
        parameters: whole ones, of one dtype and device.
        cuts: `world.size + 1` positions, the last of which may lie behind the last element: there is padding.
        shape: of the master on this rank; None: it is flat.
    """

    def __init__(self, world, parameters, cuts, shape=None):
        self.world = world
        self.parameters = parameters
        self.cuts = cuts
        self.starts = [0, *accumulate(parameter.numel() for parameter in parameters)]
        mine = self._mine(parameter.detach() for parameter in parameters).clone()
        requires_grad = any(parameter.requires_grad for parameter in parameters)
        self.master = nn.Parameter(mine if shape is None else mine.view(shape), requires_grad)

    def _mine(self, tensors):
        """This rank's part of tensors that are shaped like the parameters."""
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        padded = nn.functional.pad(flat, (0, self.cuts[-1] - flat.numel()))
        return padded[self.cuts[self.world.rank] : self.cuts[self.world.rank + 1]]

    def take_gradient(self):
        """Gives the master its part of the gradients; a parameter without one counts as zero, unless all are without."""
        gradients = [parameter.grad for parameter in self.parameters]
        if all(gradient is None for gradient in gradients):
            self.master.grad = None
            return
        pairs = zip(gradients, self.parameters, strict=True)
        whole = (torch.zeros_like(parameter) if gradient is None else gradient for gradient, parameter in pairs)
        self.master.grad = self._mine(whole).reshape(self.master.shape)

    @torch.no_grad()
    def gather(self):
        """Writes the masters of all ranks into the whole parameters. A collective."""
        flat = self.master.detach().reshape(-1)
        if self.world.group is not None:
            widths = [stop - start for start, stop in zip(self.cuts, self.cuts[1:], strict=False)]
            parts = [flat.new_empty(max(widths)) for _ in widths]
            dist.all_gather(parts, nn.functional.pad(flat, (0, max(widths) - flat.numel())), group=self.world.group)
            flat = torch.cat([part[:width] for part, width in zip(parts, widths, strict=True)])
        for start, parameter in zip(self.starts, self.parameters, strict=False):
            parameter.copy_(flat[start : start + parameter.numel()].view(parameter.shape))

    def span(self, index):
        """Which elements of a parameter are on this rank, and where they begin in the master."""
        low, high = self.cuts[self.world.rank], self.cuts[self.world.rank + 1]
        first, last = self.starts[index], self.starts[index + 1]
        start, stop = max(low, first), min(high, last)
        return (start - first, stop - first, start - low) if start < stop else (0, 0, 0)

    def extent(self, index):
        shape = tuple(self.parameters[index].shape)
        start, stop, _ = self.span(index)
        return Extent(shape, tuple(flat_range(shape, start, stop)))

    def fragment(self, value, index):
        """The local tensor of a parameter, as `Sharding.local` has it, in a tensor that is laid out like the master."""
        start, stop, at = self.span(index)
        local = value.detach().view(-1)[at : at + stop - start]
        boxes = self.extent(index).boxes
        return local.view(boxes[0].sizes) if len(boxes) == 1 else local


class WholeParameters:
    """A `Sharding` of the user's parameters: their masters, of which those in no bucket are whole."""

    def __init__(self, places):
        self._places = places

    def extent(self, parameter):
        if id(parameter) in self._places:
            bucket, index = self._places[id(parameter)]
            return bucket.extent(index)
        shape = tuple(parameter.shape)
        return Extent(shape, (Box.whole(shape),))

    def local(self, value):
        if id(value) in self._places:
            bucket, index = self._places[id(value)]
            return bucket.fragment(bucket.master, index)
        return value.detach()

    def like(self, parameter, local):
        return local

    def empty(self, parameter, key, dtype):
        return torch.empty_like(self.local(parameter), dtype=dtype)

    def versioned(self, value):
        return True


class Masters(WholeParameters):
    """A `Sharding` of masters that have one parameter each, and of the state that an optimizer keeps for them."""

    def local(self, value):
        return value.detach()


class Sharded(Strategy):
    """What the strategies of this module share. A subclass makes the buckets, and presents the state of an optimizer."""

    replicates_parameters = False

    def __init__(self):
        self.world = None
        self.wrappers = []
        self.buckets = {}  # the id of a master to its bucket
        self.places = {}  # the id of a whole parameter to (bucket, index)
        self.users = {}  # an optimizer to the whole parameters of its groups, in the user's order

    @abstractmethod
    def bucketed(self, parameters):
        """Buckets of parameters that one group of an optimizer holds; a parameter that is in none of them stays whole."""

    @hookimpl
    def layout(self, world):
        self.world = world
        return Layout.data_parallel(world)

    @hookimpl
    def prepare_model(self, model, optimizers, request):
        place_model(model, request)
        if request.evaluation or not any(parameter.requires_grad for parameter in model.parameters()):
            return model
        if self.world.group is not None:
            for tensor in (*model.parameters(), *model.buffers()):
                dist.broadcast(tensor.detach(), group_src=0, group=self.world.group)
        wrapper = Wrapper(model, request.policy.reduce)
        self.wrappers.append(wrapper)
        for optimizer in optimizers:
            self.adopt(optimizer)
        return wrapper

    @hookimpl
    def no_sync(self, model):
        return holding_back(model) if isinstance(model, Wrapper) else nullcontext()

    @hookimpl
    def trigger_sync_in_backward(self, model):
        if isinstance(model, Wrapper):
            model.due = True
        return nullcontext()

    @hookimpl
    def backward(self, loss, weight, closes, options):
        (loss * weight).backward(**options)
        for wrapper in self.wrappers:
            if wrapper.due and self.world.group is not None:
                self.average(wrapper)

    @hookimpl
    def optimizer_step(self, optimizer, step):
        if isinstance(step, partial):
            raise NotImplementedError(
                "optimizer.step() was given arguments, but the gradients that a closure computes never reach the masters of a "
                "sharded strategy. Run forward and backward before optimizer.step(), and call it without arguments."
            )
        self.adopt(optimizer)
        held = [self.buckets[id(master)] for master in held_by(optimizer) if id(master) in self.buckets]
        for bucket in held:
            bucket.take_gradient()
        result = step()
        for bucket in held:
            bucket.master.grad = None
            bucket.gather()
        return result

    @hookimpl
    def model_state(self, model):
        return capture_model(model, WholeParameters(self.places))

    @hookimpl
    def model_loaded(self, model):
        known = {id(parameter) for parameter in model.parameters()}
        for bucket in self.buckets.values():
            if id(bucket.parameters[0]) in known:
                bucket.gather()

    def average(self, wrapper):
        """Averages every gradient that some rank has; a rank that has none brings zeros."""
        trained = [parameter for parameter in wrapper.module.parameters() if parameter.requires_grad]
        present = torch.tensor([parameter.grad is not None for parameter in trained], device=self.world.device).float()
        dist.all_reduce(present, group=self.world.group)
        for parameter, ranks in zip(trained, present.tolist(), strict=True):
            if ranks:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                gradient = parameter.grad.to(wrapper.reduce or parameter.grad.dtype)
                dist.all_reduce(gradient, group=self.world.group)
                parameter.grad.copy_(gradient / self.world.size)

    def adopt(self, optimizer):
        """Puts masters in the place of the whole parameters that an optimizer holds, also of those that it got since."""
        if optimizer not in self.users:
            self.users[optimizer] = []
            self._clear_whole_gradients_too(optimizer)
        for group in optimizer.param_groups[len(self.users[optimizer]) :]:
            self.users[optimizer].append(_unique(whole for held in group["params"] for whole in self._whole(held)))
        for group in optimizer.param_groups:
            for wrapper in self.wrappers:
                own = {id(parameter) for parameter in wrapper.module.parameters()} - self.places.keys()
                self._shard([held for held in group["params"] if id(held) in own], wrapper, optimizer)
            group["params"][:] = _unique(map(self._master, group["params"]))

    def _shard(self, parameters, wrapper, optimizer):
        for bucket in self.bucketed(parameters):
            if any(optimizer.state.get(parameter) for parameter in bucket.parameters):
                raise ValueError(
                    f"prepare() was given a {type(optimizer).__name__} that has taken steps, but its state is that of whole "
                    f"parameters, and a sharded strategy steps masters. Prepare it before its first step."
                )
            wrapper.masters.append(bucket.master)
            self.buckets[id(bucket.master)] = bucket
            self.places.update({id(parameter): (bucket, index) for index, parameter in enumerate(bucket.parameters)})

    def _master(self, parameter):
        return self.places[id(parameter)][0].master if id(parameter) in self.places else parameter

    def _whole(self, held):
        return self.buckets[id(held)].parameters if id(held) in self.buckets else [held]

    def _clear_whole_gradients_too(self, optimizer):
        # A gate that the optimizer wears already has captured the method that it calls.
        gate, users = gate_of(optimizer), self.users[optimizer]
        owner, name = (optimizer, "zero_grad") if gate is None else (gate, "_own_zero_grad")
        own = getattr(owner, name)

        def zero_grad(set_to_none=True):
            own(set_to_none)
            for parameter in (parameter for group in users for parameter in group if parameter.grad is not None):
                if set_to_none:
                    parameter.grad = None
                else:
                    parameter.grad.zero_()

        setattr(owner, name, zero_grad)


class ByRows(Sharded):
    """One bucket per parameter, cut between the rows of dim 0: a master is laid out as the parameter is."""

    @abstractmethod
    def cuts(self, rows):
        """The first row of each rank, and their number."""

    def bucketed(self, parameters):
        return [self._of(parameter) for parameter in parameters]

    def _of(self, parameter):
        shape = tuple(parameter.shape)
        rows, row = (shape[0], shape[1:]) if shape else (1, ())
        cuts = self.cuts(rows)
        mine = cuts[self.world.rank + 1] - cuts[self.world.rank]
        local = (
            () if not shape and mine else (mine, *row)
        )  # a number cannot be cut: one rank has it, the others nothing
        return Bucket(self.world, [parameter], [cut * math.prod(row) for cut in cuts], local)

    @hookimpl
    def optimizer_state(self, optimizer, names):
        self.adopt(optimizer)
        return capture_optimizer(optimizer, *self._masters_of(names))

    @hookimpl
    def optimizer_misfits(self, optimizer, names, saved):
        self.adopt(optimizer)
        return list_misfits(optimizer, *self._masters_of(names), saved)

    @hookimpl
    def load_optimizer_state(self, optimizer, names, saved):
        self.adopt(optimizer)
        restore_optimizer(optimizer, *self._masters_of(names), saved)

    def _masters_of(self, names):
        """The names of what optimizers hold, and how it is laid out."""
        masters = {id(bucket.master): (bucket, 0) for bucket in self.buckets.values()}
        renamed = {id(bucket.master): names[id(bucket.parameters[0])] for bucket in self.buckets.values()}
        return {**names, **renamed}, Masters(masters)


class Rows(ByRows):
    """Equal chunks, as FSDP2 cuts them: the last ranks may have fewer rows, or none."""

    def cuts(self, rows):
        chunk = math.ceil(rows / self.world.size)
        return [min(rank * chunk, rows) for rank in range(self.world.size + 1)]


class Uneven(ByRows):
    """Rank r has r + 1 shares: the first ranks may have no rows."""

    def cuts(self, rows):
        shares = self.world.size * (self.world.size + 1) // 2
        return [rows * (rank * (rank + 1) // 2) // shares for rank in range(self.world.size + 1)]


class Flat(Sharded):
    """All trained parameters of a group and a dtype in one bucket, padded and cut into equal ranges."""

    def bucketed(self, parameters):
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        dtypes = dict.fromkeys(parameter.dtype for parameter in trained)
        return [self._of([parameter for parameter in trained if parameter.dtype is dtype]) for dtype in dtypes]

    def _of(self, parameters):
        part = math.ceil(sum(parameter.numel() for parameter in parameters) / self.world.size)
        return Bucket(self.world, parameters, [rank * part for rank in range(self.world.size + 1)])

    @hookimpl
    def optimizer_state(self, optimizer, names):
        self.adopt(optimizer)
        layouts = layouts_of(optimizer)
        found = OptimizerState(kind_of(optimizer), self._groups(optimizer, self._named(optimizer, names)))
        for _, held, fragments in self._parts(optimizer, names):
            for key, value in optimizer.state.get(held, {}).items():
                for fragment in fragments:
                    if isinstance(value, torch.Tensor):
                        found.entries[f"{fragment.name}/{key}"] = fragment.entry(key, value, layouts.get(key))
                    else:
                        found.values.setdefault(fragment.name, {})[key] = value
        return found

    @hookimpl
    def optimizer_misfits(self, optimizer, names, saved):
        self.adopt(optimizer)
        groups = self._groups(optimizer, self._named(optimizer, names))
        here, there = ([sorted(group["names"]) for group in one] for one in (groups, saved.groups))
        if saved.kind != kind_of(optimizer) or here != there:
            return [
                f"the optimizer is a {kind_of(optimizer)} of {here}, and the checkpoint has a {saved.kind} of {there}"
            ]
        return [line for _, held, fragments in self._parts(optimizer, names) for line in _unlike(fragments, saved)]

    @hookimpl
    def load_optimizer_state(self, optimizer, names, saved):
        self.adopt(optimizer)
        for group, held, fragments in self._parts(optimizer, names):
            optimizer.state.pop(held, None)
            if state := _flat_state(held, group, fragments, saved):
                optimizer.state[held] = state
        for group, options in zip(optimizer.param_groups, saved.groups, strict=True):
            group.update({key: value for key, value in options.items() if key not in {"names", *OF_THIS_PROCESS}})

    def _parts(self, optimizer, names):
        """What an optimizer holds, with its group and the parameters that are in it."""
        named = self._named(optimizer, names)
        for group in optimizer.param_groups:
            for held in group["params"]:
                yield group, held, self._fragments(held, named)

    def _named(self, optimizer, names):
        groups = enumerate(self.users[optimizer])
        return {
            id(p): names.get(id(p), f"loose.{number}.{at}") for number, group in groups for at, p in enumerate(group)
        }

    def _groups(self, optimizer, named):
        return [
            {**{key: value for key, value in group.items() if key != "params"}, "names": [named[id(p)] for p in users]}
            for group, users in zip(optimizer.param_groups, self.users[optimizer], strict=True)
        ]

    def _fragments(self, held, named):
        if id(held) not in self.buckets:
            return [Fragment(named[id(held)], WholeParameters({}).extent(held), torch.Tensor.detach)]
        bucket = self.buckets[id(held)]
        return [
            Fragment(named[id(parameter)], bucket.extent(index), partial(bucket.fragment, index=index))
            for index, parameter in enumerate(bucket.parameters)
        ]


class Fragment(NamedTuple):
    """What a flat master has of one parameter; `local` takes it out of a tensor that is laid out like the master."""

    name: str
    extent: Extent
    local: Callable[[torch.Tensor], torch.Tensor]

    def entry(self, key, value, layout):
        if layout in (REPLICATED, COUNTER):
            return Replicated(value.detach())
        if layout == ELEMENTWISE:
            return Elementwise(self.extent.shape, value.dtype, tuple(pieces_of(self.extent.boxes, self.local(value))))
        raise CheckpointError(
            f"{self.name}/{key} was to be saved, but nobody declared how it is laid out ({layout}), and a flat buffer cannot be "
            f"cut into what belongs to each parameter without that. Declare it in accel_layouts of the optimizer."
        )


def _flat_state(held, group, fragments, saved):
    """What an optimizer is to keep for one master; the states of the parameters in it are alike."""
    entries, values = _of_parameter(fragments[0].name, saved)
    state = dict(values)
    for key, entry in entries.items():
        if entry.kind == ELEMENTWISE:
            state[key] = torch.zeros_like(held, dtype=entry.dtype, requires_grad=False)
            for fragment in fragments:
                saved.read(f"{fragment.name}/{key}", fragment.entry(key, state[key], ELEMENTWISE))
        else:
            device = held.device if group.get("capturable") or group.get("fused") else torch.device("cpu")
            state[key] = _number(f"{fragments[0].name}/{key}", entry, saved).to(device)
    return state


def _unlike(fragments, saved):
    """Why parameters that share a master cannot have the states that were saved of them."""
    first, *others = (_alike(fragment.name, saved) for fragment in fragments)
    if wrong := set(first[0].values()) - {ELEMENTWISE, REPLICATED}:
        yield f"{fragments[0].name!r} has {', '.join(sorted(wrong))} state, which means nothing in a flat buffer"
    for fragment, other in zip(fragments[1:], others, strict=True):
        if other != first:
            yield f"{fragment.name!r} has the state {other}, and {fragments[0].name!r}, in the same buffer, {first}"


def _alike(name, saved):
    """What parameters that share a master have in common."""
    entries, values = _of_parameter(name, saved)
    numbers = {
        k: _number(f"{name}/{k}", entry, saved).tolist() for k, entry in entries.items() if entry.kind == REPLICATED
    }
    return {key: entry.kind for key, entry in entries.items()}, numbers, values


def _number(name, entry, saved):
    value = torch.zeros(entry.shape, dtype=entry.dtype)
    saved.read(name, Replicated(value))
    return value


def _of_parameter(name, saved):
    """The saved entries of a parameter, by the key of its state, and the values that are no tensors."""
    parted = ((*entry.rpartition("/"), saved_entry) for entry, saved_entry in saved.described().items())
    return {key: entry for parameter, _, key, entry in parted if parameter == name}, saved.values.get(name, {})


@contextmanager
def holding_back(wrapper):
    before, wrapper.held_back = wrapper.held_back, True
    try:
        yield
    finally:
        wrapper.held_back = before


def held_by(optimizer):
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _unique(tensors):
    return list({id(tensor): tensor for tensor in tensors}.values())


class BeginsEveryPartAtTheFirstRow(Rows):
    """Wrong on purpose: its parts do not make a whole."""

    @hookimpl
    def model_state(self, model):
        return {name: _shifted(entry) for name, entry in super().model_state(model).items()}


def _shifted(entry):
    if not isinstance(entry, Elementwise):
        return entry
    pieces = tuple(Piece(Box((0,) * len(box.sizes), box.sizes), data) for box, data in entry.pieces)
    return replace(entry, pieces=pieces)
