"""Prepared models of which a rank has parts, to functions that read or write a model's weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from accel_checkpoint import WeightGather, capture_model, on_each_rank
from accel_core import World
from accel_core.api.component import ClassOverride
from accel_deepspeed.model_engine import engine_that_steps
from accel_deepspeed.sharding import ZeroSharding

if TYPE_CHECKING:
    from accel_core.api.layouts import State

_CALL = "save_pretrained()"


class StatesParts(ClassOverride):
    """A class override of the user's model in stages 1 to 3: states this rank's trained parts."""

    def accel_state(self) -> State:
        """The entries that weights are read into, and written from."""
        for parameter in self.parameters():  # type: ignore[attr-defined]
            engine = engine_that_steps(parameter)
            if engine is not None:
                engine.expect_changes()  # the caller may read weights into the masters
        return capture_model(self, ZeroSharding())  # type: ignore[arg-type]


class SavesWhole(StatesParts):
    """A class's own `save_pretrained` with data in stage 3, where `state_dict()` has none."""

    def save_pretrained(self, *args: Any, **kwargs: Any) -> Any:
        """Saves all weights on the main process. Collective, unless given a `state_dict`."""
        save = super().save_pretrained  # type: ignore[misc]
        if any(isinstance(each, Mapping) for each in (*args[1:], kwargs.get("state_dict"))):
            return save(*args, **kwargs)
        world = World.current()
        world.arrive(_CALL)
        gathering = WeightGather(on_each_rank(world, "for weights to be presented", self.accel_state), world)

        def save_all() -> Any:
            state = gathering.all()
            vars(self)["state_dict"] = lambda *_, **__: dict(state)
            try:
                return save(*args, **kwargs)
            finally:
                del vars(self)["state_dict"]

        return gathering.together(_CALL, save_all)
