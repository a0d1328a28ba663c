"""Strategies that train right, and are wrong in one place each about what is saved: the suite has to tell them apart."""

from __future__ import annotations

from dataclasses import replace

import sharded_strategies
import wrong_strategies
from sharded_strategies import Rows
from torch import nn

from accel_checkpoint import capture_model
from accel_core import hookimpl
from accel_core.api.layouts import Opaque, Replicated


class Right(wrong_strategies.Right):
    """Every rank holds everything, and says so, so the core does it all."""


class ForgetsWhatItComputesWith(Rows):
    """Fills the masters, and leaves the whole parameters as they are."""

    @hookimpl
    def model_loaded(self, model):
        pass


class FillsOnlyWhatItComputesWith(Rows):
    """Presents whole parameters, and so leaves the masters as they are."""

    @hookimpl
    def model_state(self, model):
        return capture_model(model)

    @hookimpl
    def model_loaded(self, model):
        pass


class BeginsEveryPartAtTheFirstRow(sharded_strategies.BeginsEveryPartAtTheFirstRow):
    """As it is: tests of the core have it too."""


class ForgetsTheOptimizer(Rows):
    """Has groups, and no state of parameters."""

    @hookimpl
    def optimizer_state(self, optimizer, names):
        return replace(super().optimizer_state(optimizer, names), entries={}, values={})


class ForgetsTheSecondGroup(Rows):
    """Has the state of the first group's parameters alone."""

    @hookimpl
    def optimizer_state(self, optimizer, names):
        found = super().optimizer_state(optimizer, names)
        kept = {name for group in found.groups[:1] for name in group["names"]}
        entries = {key: entry for key, entry in found.entries.items() if key.rpartition("/")[0] in kept}
        values = {name: value for name, value in found.values.items() if name in kept}
        return replace(found, entries=entries, values=values)


class RestoresOptionsOfOneGroup(Rows):
    @hookimpl
    def load_optimizer_state(self, optimizer, names, saved):
        kept = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
        super().load_optimizer_state(optimizer, names, saved)
        for group, options in list(zip(optimizer.param_groups, kept, strict=True))[1:]:
            group.update(options)


class RestoresNoOptions(Rows):
    @hookimpl
    def load_optimizer_state(self, optimizer, names, saved):
        kept = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
        super().load_optimizer_state(optimizer, names, saved)
        for group, options in zip(optimizer.param_groups, kept, strict=True):
            group.update(options)


class HasNamesOfItsOwn(Rows):
    """Reads what it wrote, and nobody else does."""

    def _masters_of(self, names):
        return super()._masters_of({number: name.replace(".", ".module.", 1) for number, name in names.items()})


class FindsEverythingFitting(Rows):
    @hookimpl
    def optimizer_misfits(self, optimizer, names, saved):
        return []


class KeepsTheBuffersOfEveryRank(Rows):
    """Saves the buffers of each rank for itself."""

    @hookimpl
    def model_state(self, model):
        entries = super().model_state(model)
        return {name: self._own(entry) if isinstance(entry, Replicated) else entry for name, entry in entries.items()}

    def _own(self, entry):
        return Opaque(entry.data, "a buffer", f"rank {self.world.rank}", entry.data.copy_)


class LosesPendingGradients(Right):
    """Adds up the gradients of an open window where the core does not find them."""

    def __init__(self):
        super().__init__()
        self.pending = {}

    @hookimpl
    def backward(self, loss, weight, closes, options):
        (loss * weight).backward(**options)
        for wrapper in self.wrappers:
            for parameter in wrapper.parameters():
                if parameter.grad is not None:
                    total = self.pending.pop(parameter, 0) + parameter.grad
                    parameter.grad = total if closes else None
                    self.pending.update({} if closes else {parameter: total})
            if closes:
                self.average(wrapper)


class BreaksTies(Rows):
    @hookimpl
    def model_loaded(self, model):
        super().model_loaded(model)
        if hasattr(model, "decoder"):
            model.decoder.weight = nn.Parameter(model.encoder.weight.detach().clone())
