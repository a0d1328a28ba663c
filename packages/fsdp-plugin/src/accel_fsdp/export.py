"""Sharded models of libraries that write their models by a `save_pretrained` of their own.

Those methods take the weights from `state_dict()`, of which every rank has a part. So the call
becomes a collective: the main process runs the user's method with all weights, and the others send
it their parts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from accel_checkpoint import WeightGather, on_each_rank
from accel_core import World
from accel_fsdp.gradient_sync import ShardedModel

if TYPE_CHECKING:
    from torch import nn

_CALL = "save_pretrained()"


def save_whole(model: nn.Module) -> None:
    """Has the `save_pretrained` of a sharded model, if its class has one, write all weights."""
    if callable(getattr(type(model), "save_pretrained", None)):
        type(model).save_pretrained = _save_pretrained  # type: ignore[attr-defined]


def _save_pretrained(self: Any, *args: Any, **kwargs: Any) -> Any:
    """The user's method, with all weights on the main process. Collective without `state_dict`."""
    save = super(ShardedModel, self).save_pretrained
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
