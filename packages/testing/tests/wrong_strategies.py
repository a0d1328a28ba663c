"""Strategies that are wrong in one place each, and a right one: the conformance suite has to tell them apart.

Each breaks one sentence of the suite in the way that a first draft, or an engine with other habits, would.
"""

from __future__ import annotations

import atexit
import os
from contextlib import contextmanager, nullcontext

import torch
import torch.distributed as dist
from plain_strategies import PlainStrategy
from torch import nn

from accel_core import Shard, hookimpl


class Right(PlainStrategy):
    """Right as it is."""


class ForgetsAveraging(Right):
    def average(self, wrapper):
        pass


class AveragesTwice(Right):
    """Divides once more, as an engine does that expects the loop to have summed."""

    def average(self, wrapper):
        super().average(wrapper)
        for parameter in wrapper.parameters():
            if parameter.grad is not None:
                parameter.grad.div_(self.world.size)


class Sums(Right):
    def average(self, wrapper):
        for parameter in wrapper.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)


class AveragesOnlyTheFirstModel(Right):
    def average(self, wrapper):
        if wrapper is self.wrappers[0]:
            super().average(wrapper)


class IgnoresNoSync(Right):
    @contextmanager
    def holding_back(self, wrapper):
        yield


class StaysInNoSync(Right):
    """Leaves `no_sync` at the end of the block, and not where an error leaves it."""

    @contextmanager
    def holding_back(self, wrapper):
        before, wrapper.held_back = wrapper.held_back, True
        yield
        wrapper.held_back = before


class DecidesAtTheBackward(Right):
    """Asks whether the backward is inside `no_sync`, and forgets where its forward ran."""

    @hookimpl
    def backward(self, loss, weight, closes, options):
        for wrapper in self.wrappers:
            wrapper.due = not wrapper.held_back
        super().backward(loss, weight, closes, options)


class IgnoresTheTrigger(Right):
    @hookimpl
    def trigger_sync_in_backward(self, model):
        return nullcontext()


class SumsEachMicroBatchOfAWindow(Right):
    """Adds over the ranks at each micro-batch, also what was added before, and divides at the end."""

    @hookimpl
    def backward(self, loss, weight, closes, options):
        (loss * weight).backward(**options)
        for wrapper in self.wrappers:
            due, wrapper.due = wrapper.due, True
            self.average(wrapper)
            if not due:
                for parameter in wrapper.parameters():
                    if parameter.grad is not None:
                        parameter.grad.mul_(self.world.size)
            wrapper.due = due


class DropsTheShortWindow(Right):
    """Averages the windows of four for which it was configured, and lets those of two go by."""

    @hookimpl
    def backward(self, loss, weight, closes, options):
        self.dropped = weight == 0.5
        super().backward(loss, weight, closes, options)

    def average(self, wrapper):
        if not self.dropped:
            super().average(wrapper)


class IgnoresTheWeight(Right):
    @hookimpl
    def backward(self, loss, weight, closes, options):
        super().backward(loss, 1.0, closes, options)


class IgnoresBackwardOptions(Right):
    @hookimpl
    def backward(self, loss, weight, closes, options):
        super().backward(loss, weight, closes, {})


class ReplacesParameters(Right):
    """Gives the model new parameters, and leaves the old ones in the optimizer."""

    def wrap(self, model, optimizers):
        made = {old: nn.Parameter(old.detach().clone(), old.requires_grad) for old in model.parameters()}
        for module in model.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                setattr(module, name, made[parameter])
        return super().wrap(model, optimizers)


class RepointsTheFirstOptimizer(ReplacesParameters):
    """Gives the new parameters to the first of several optimizers alone."""

    def wrap(self, model, optimizers):
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        wrapper = super().wrap(model, optimizers)
        for group in (group for optimizer in optimizers[:1] for group in optimizer.param_groups):
            group["params"][:] = [model.get_parameter(names[id(parameter)]) for parameter in group["params"]]
        return wrapper


class StepsTheFirstGroup(Right):
    @hookimpl
    def apply_step(self, optimizer, step):
        every, optimizer.param_groups = optimizer.param_groups, optimizer.param_groups[:1]
        try:
            return step()
        finally:
            optimizer.param_groups = every


class BreaksTies(Right):
    """Splits what is shared, and has the optimizer train both halves."""

    def wrap(self, model, optimizers):
        seen = set()
        for module in model.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                if id(parameter) in seen:
                    half = nn.Parameter(parameter.detach().clone())
                    setattr(module, name, half)
                    for optimizer in optimizers:
                        optimizer.param_groups[0]["params"].append(half)
                seen.add(id(parameter))
        return super().wrap(model, optimizers)


class WrapsInside(Right):
    """Moves the user's modules one level down."""

    def wrap(self, model, optimizers):
        for name, child in list(model.named_children()):
            setattr(model, name, nn.Sequential(child))
        return super().wrap(model, optimizers)


class RenamesTheClass(Right):
    """Swaps the class of the user's object, and leaves it so."""

    def wrap(self, model, optimizers):
        model.__class__ = type("Synchronised", (type(model),), {})
        return super().wrap(model, optimizers)


class WrapsWhatIsNotTrained(Right):
    def untrained(self, model):
        return nn.parallel.DistributedDataParallel(model)


class KeepsEachRanksWeights(Right):
    def share(self, model):
        pass


class KeepsEachRanksFrozenParts(Right):
    def share(self, model):
        for parameter in model.parameters():
            if parameter.requires_grad:
                dist.broadcast(parameter.data, src=0)
        for buffer in model.buffers():
            dist.broadcast(buffer, src=0)


class KeepsEachRanksBuffers(Right):
    def share(self, model):
        for parameter in model.parameters():
            dist.broadcast(parameter.data, src=0)


class GivesEveryRankTheSameShard(Right):
    def shard(self, world):
        return Shard(0, world.size)


class ClipsPerRank(Right):
    """Takes the parameters of its own rank for all."""

    @hookimpl
    def clip_gradients(self, parameters, max_norm, norm_type):
        return nn.utils.clip_grad_norm_(parameters[self.world.rank :: self.world.size], max_norm, norm_type)


class IgnoresTheNormType(Right):
    @hookimpl
    def clip_gradients(self, parameters, max_norm, norm_type):
        return nn.utils.clip_grad_norm_(parameters, max_norm)


class ScalesSmallGradientsUp(Right):
    """Gives gradients the largest norm, also where theirs is smaller."""

    @hookimpl
    def clip_gradients(self, parameters, max_norm, norm_type):
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        norm = nn.utils.get_total_norm(gradients, norm_type)
        if max_norm != float("inf"):
            torch._foreach_mul_(gradients, max_norm / norm)
        return norm


class IgnoresThePolicy(Right):
    def place(self, model, request):
        if request.device is not None:
            model.to(request.device)


class IgnoresTheReduceDtype(Right):
    def average(self, wrapper):
        wrapper.reduce = None
        super().average(wrapper)


class ResetsBuffers(Right):
    """Hands out the buffers of the day it was prepared."""

    def wrap(self, model, optimizers):
        kept = {name: buffer.clone() for name, buffer in model.named_buffers()}

        def restore(module, *_):
            for name, buffer in module.named_buffers():
                buffer.copy_(kept[name])

        model.register_forward_pre_hook(restore)
        return super().wrap(model, optimizers)


class SeedsTheUsersStream(Right):
    def share(self, model):
        torch.manual_seed(0)
        super().share(model)


class SetsTheEnvironment(Right):
    def share(self, model):
        os.environ["WRONG_STRATEGY_WAS_HERE"] = str(len(self.wrappers))
        super().share(model)


_kept = []


class KeepsModelsAlive(Right):
    def share(self, model):
        _kept.append(model)
        super().share(model)


class AbortsAtExit(Right):
    def share(self, model):
        if not _kept:
            atexit.register(os.abort)
            _kept.append(model)
        super().share(model)


class RaisesOnOneRank(Right):
    """Ends one rank in the middle of clipping, while the other waits."""

    @hookimpl
    def clip_gradients(self, parameters, max_norm, norm_type):
        if self.world.rank == 1:
            raise ValueError("no gradients on this rank")
        dist.barrier()
        return nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)
