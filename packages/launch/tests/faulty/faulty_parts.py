"""Strategies that are wrong in one place each: `accel test` has to find it."""

from __future__ import annotations

from accel_core import DDP, Layout, Strategy, hookimpl, place_model
from accel_core.api.layouts import Elementwise


class Alone(Strategy):
    """Leaves every rank to itself."""

    replicates_parameters = True

    @hookimpl
    def layout(self, world):
        return Layout.data_parallel(world)

    @hookimpl
    def prepare_model(self, model, optimizers, request):
        place_model(model, request)
        return model


class Summing(DDP):
    """Adds gradients up, and forgets to divide."""

    @hookimpl
    def backward(self, loss, weight, options):
        (2 * loss * weight).backward(**options)


class Forgetful(DDP):
    """Gives copies to be filled, so that nothing arrives in the model."""

    @hookimpl
    def model_state(self, model, prepared):
        return {name: Elementwise.whole(value.detach().clone()) for name, value in model.state_dict().items()}


class Amnesic(DDP):
    """Does not give optimizers their state back."""

    @hookimpl
    def load_optimizer_state(self):
        pass


class Raising(DDP):
    """Refuses every model."""

    @hookimpl
    def prepare_model(self, model, optimizers, request):
        raise ValueError("This model was to be prepared, but none will do. Take another strategy.")


class Parted(DDP):
    """Is right, but says that no rank has everything."""

    replicates_parameters = False
