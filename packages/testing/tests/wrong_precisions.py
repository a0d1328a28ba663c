"""Precisions that are wrong in one place each, and a right one: the conformance suite has to tell them apart.

`Right` computes in bfloat16, scales losses and leaves out steps that overflow, written down as plainly as the suite allows. Each of
the others breaks one of its sentences in the way that a first draft would.
"""

from __future__ import annotations

import threading
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn

from accel_core import DDP, SKIPPED, Precision, PrecisionPolicy, Single, hookimpl
from accel_core.api.component import ClassOverride, override_class
from accel_testing.precision_suite import Setting

NARROW, WIDE = torch.bfloat16, torch.float32


class Right(Precision):
    """Halves its scale with each overflow, and nothing else changes."""

    policy = PrecisionPolicy(compute=NARROW, output=WIDE)
    setting = Setting("single", 1)

    def __init__(self):
        self.scale = 1024.0
        self.unscaled = set()
        self.world = None

    @hookimpl
    def start(self, world):
        self.world = world

    @hookimpl
    def scale_loss(self, loss):
        return loss * self.scale

    @hookimpl
    def unscale_gradients(self, optimizer):
        for gradient in self.gradients(optimizer):
            gradient.div_(self.scale)
        self.unscaled.add(id(optimizer))

    @hookimpl
    def optimizer_step(self, optimizer, step):
        if id(optimizer) not in self.unscaled:
            self.unscale_gradients(optimizer)
        self.unscaled.discard(id(optimizer))
        if self.overflows(optimizer):
            self.scale /= 2
            return SKIPPED
        return step()

    def state_dict(self):
        return {"scale": self.scale}

    def load_state_dict(self, state):
        self.scale = state["scale"]

    def __getstate__(self):
        return {name: value for name, value in vars(self).items() if name != "world"}

    @staticmethod
    def undo():
        """Takes back what a job has done to the process."""

    def details(self):
        return {"policy": str(self.policy), "scaler": f"multiplies losses by {self.scale:g}"}

    def gradients(self, optimizer):
        parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
        return [parameter.grad for parameter in parameters if parameter.grad is not None]

    def overflows(self, optimizer):
        found = torch.tensor(float(self.finds_overflow(optimizer)))
        if self.world.size > 1:
            dist.all_reduce(found, dist.ReduceOp.MAX)
        return bool(found)

    def finds_overflow(self, optimizer):
        return not all(bool(torch.isfinite(gradient).all()) for gradient in self.gradients(optimizer))


class DependsOnTheDay(Right):
    made = 0

    def __init__(self):
        super().__init__()
        DependsOnTheDay.made += 1
        self.policy = PrecisionPolicy(compute=NARROW, output=WIDE if DependsOnTheDay.made % 2 else None)


class CannotBePickled(Right):
    def __init__(self):
        super().__init__()
        self.lock = threading.Lock()


class CastsIntegers(Right):
    @hookimpl
    def convert_model(self, model):
        model.register_forward_pre_hook(all_floating, with_kwargs=True)


def all_floating(module, args, kwargs):
    marks = kwargs.get("marks")
    return args, ({"marks": {name: mark.float() for name, mark in marks.items()}} if marks else {})


class Other(Single):
    """A strategy that honours something else than what was asked."""

    def other(self, request):
        raise NotImplementedError

    @hookimpl
    def prepare_model(self, model, optimizers, request):
        return super().prepare_model(model, optimizers, replace(request, policy=self.other(request)))


class Unanswered(Other):
    def other(self, request):
        return replace(request.policy, output=None)


class ForgetsTheOutput(Right):
    setting = Setting(Unanswered, 1)


class Whole(DDP):
    @hookimpl
    def prepare_model(self, model, optimizers, request):
        policy = replace(request.policy, reduce=None)
        return super().prepare_model(model, optimizers, replace(request, policy=policy))


class TravelsWhole(Right):
    policy = PrecisionPolicy(compute=NARROW, output=WIDE, reduce=NARROW)
    setting = Setting(Whole, 2)


class Received(Other):
    def other(self, request):
        return replace(request.policy, input=None)


class ForgetsTheInput(Right):
    policy = PrecisionPolicy(compute=NARROW, output=WIDE, input=NARROW)
    setting = Setting(Received, 1)


class Refusing(Other):
    def other(self, request):
        raise ValueError(f"This strategy cannot compute in {request.policy.compute}. Choose mixed_precision='no'.")


class IsRefused(Right):
    setting = Setting(Refusing, 1)


class OnlyTraining(Other):
    def other(self, request):
        return PrecisionPolicy() if request.evaluation else request.policy


class ForgetsEvaluation(Right):
    setting = Setting(OnlyTraining, 1)


class RoundsInTrainingOnly(Right):
    @hookimpl
    def convert_model(self, model):
        model.backbone.register_forward_hook(rounded)


def rounded(module, args, output):
    return rounded_to(1 / 256, output) if module.training else output


def rounded_to(step, output):
    """To multiples of `step`; gradients pass."""
    return output + ((output / step).round() * step - output).detach()


class ComputesOnItsOwn(Right):
    """Declares nothing, and casts inside."""

    policy = PrecisionPolicy(output=WIDE)

    @hookimpl
    def convert_model(self, model):
        for child in model.children():
            override_class(child, Casting)


class Casting(ClassOverride):
    def __call__(self, *args, **kwargs):
        with torch.autocast("cpu", NARROW):
            return super().__call__(*args, **kwargs)


class SwitchesAutocastOn(Right):
    @hookimpl
    def start(self, world):
        super().start(world)
        torch.set_autocast_dtype("cpu", NARROW)
        torch.set_autocast_enabled("cpu", True)

    @staticmethod
    def undo():
        torch.set_autocast_enabled("cpu", False)


class ConvertsForAll(Right):
    """Changes how every linear layer of the process computes."""

    original = nn.Linear.forward

    @hookimpl
    def convert_model(self, model):
        nn.Linear.forward = narrowly

    @staticmethod
    def undo():
        nn.Linear.forward = ConvertsForAll.original


def narrowly(module, x):
    return nn.functional.linear(x.to(NARROW), module.weight.to(NARROW), module.bias.to(NARROW)).to(x.dtype)


class ComputesTooNarrowly(Right):
    """Rounds what the first layer makes to whole numbers."""

    @hookimpl
    def convert_model(self, model):
        model.backbone.register_forward_hook(coarse)


def coarse(module, args, output):
    return rounded_to(1.0, output)


class DetachesParameters(Right):
    """Computes with a copy of the weight, which nobody trains."""

    @hookimpl
    def convert_model(self, model):
        model.backbone.register_buffer("copied", model.backbone.weight.detach().clone(), persistent=False)
        override_class(model.backbone, Detached)


class Detached(ClassOverride):
    def forward(self, x):
        return nn.functional.linear(x, self.copied + 0.0 * self.weight, self.bias)


class StaysWhenFreed(Right):
    """Rounds less than the compute dtype does, and goes on with that in a freed model."""

    @hookimpl
    def convert_model(self, model):
        model.backbone.register_forward_hook(slightly)


def slightly(module, args, output):
    return rounded_to(1 / 256, output)


class WrapsModules(Right):
    @hookimpl
    def convert_model(self, model):
        model.head = nn.Sequential(model.head)


class AddsBuffers(Right):
    @hookimpl
    def convert_model(self, model):
        model.backbone.register_buffer("largest", torch.ones(()))


class LeavesAFunctionOnTheModel(Right):
    @hookimpl
    def convert_model(self, model):
        model.register_forward_hook(lambda module, args, output: output)


class NeverUnscalesBeforeClipping(Right):
    @hookimpl
    def unscale_gradients(self, optimizer):
        pass

    @hookimpl
    def optimizer_step(self, optimizer, step):
        super().unscale_gradients(optimizer)
        return super().optimizer_step(optimizer, step)


class UnscalesAgain(Right):
    """Divides at the step, whether or not that has been done for clipping."""

    @hookimpl
    def optimizer_step(self, optimizer, step):
        self.unscaled.discard(id(optimizer))
        return super().optimizer_step(optimizer, step)


class UnscalesOneForAll(Right):
    """Remembers that gradients were unscaled, and not of which optimizer."""

    done = False

    @hookimpl
    def unscale_gradients(self, optimizer):
        super().unscale_gradients(optimizer)
        self.done = True

    @hookimpl
    def optimizer_step(self, optimizer, step):
        self.unscaled = {id(optimizer)} if self.done else set()
        result = super().optimizer_step(optimizer, step)
        self.done = False
        return result


class ForgetsOthersAtAStep(Right):
    """After a step no optimizer counts as unscaled."""

    @hookimpl
    def optimizer_step(self, optimizer, step):
        try:
            return super().optimizer_step(optimizer, step)
        finally:
            self.unscaled.clear()


class LooksAtTheFirstOptimizer(Right):
    """Decides for all optimizers of an iteration by the gradients of the first."""

    found = None

    @hookimpl
    def scale_loss(self, loss):
        self.found = None
        return super().scale_loss(loss)

    def overflows(self, optimizer):
        if self.found is None:
            self.found = super().overflows(optimizer)
        return self.found


class ScalesUnlikely(Right):
    """Divides by something else on each rank."""

    setting = Setting("ddp", 2)

    @hookimpl
    def unscale_gradients(self, optimizer):
        super().unscale_gradients(optimizer)
        for gradient in self.gradients(optimizer):
            gradient.mul_(1.0 + 1e-4 * self.world.rank)


class SkipsOnOneRank(Right):
    """Looks at the loss of its own rank."""

    setting = Setting("ddp", 2)

    @hookimpl
    def scale_loss(self, loss):
        self.found = not bool(torch.isfinite(loss))
        return super().scale_loss(loss)

    def overflows(self, optimizer):
        return self.found


class KeepsQuietAboutSkipping(Right):
    @hookimpl
    def optimizer_step(self, optimizer, step):
        super().optimizer_step(optimizer, step)


class StepsWithoutTheOverflow(Right):
    """Replaces what is not finite by zeros, steps, and says that it has not."""

    @hookimpl
    def optimizer_step(self, optimizer, step):
        if super().optimizer_step(optimizer, step) is not SKIPPED:
            return None
        for gradient in self.gradients(optimizer):
            gradient.nan_to_num_(0.0, 0.0, 0.0)
        step()
        return SKIPPED


class NeverRecovers(Right):
    overflown = False

    def overflows(self, optimizer):
        self.overflown = super().overflows(optimizer) or self.overflown
        return self.overflown


class SkipsNow(Right):
    """Leaves out every fourth step, to be on the safe side."""

    taken = 0

    @hookimpl
    def optimizer_step(self, optimizer, step):
        self.taken += 1
        return SKIPPED if self.taken % 4 == 0 else super().optimizer_step(optimizer, step)


class NeverSteps(Right):
    @hookimpl
    def optimizer_step(self, optimizer, step):
        return super().optimizer_step(optimizer, lambda: None)


class ForgetsItsState(Right):
    state_dict = load_state_dict = None


class RemembersHalf(Right):
    """Trains by a number that it does not save."""

    taken = 0

    @hookimpl
    def optimizer_step(self, optimizer, step):
        self.taken += 1
        for gradient in self.gradients(optimizer):
            gradient.mul_(1.0 + 1e-4 * self.taken)
        return super().optimizer_step(optimizer, step)


class SaysNothing(Right):
    def details(self):
        return {}


_kept = []


class KeepsModelsAlive(Right):
    @hookimpl
    def convert_model(self, model):
        _kept.append(model)
