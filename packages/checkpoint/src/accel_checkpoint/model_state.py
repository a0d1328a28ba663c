"""Checkpoint entries of a model, under the names of its `state_dict()`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from accel_checkpoint.deferred import is_deferred, resident
from accel_checkpoint.optimizers.sharding import Sharding, Whole, pieces_of
from accel_core import CheckpointError
from accel_core.api.component import listed
from accel_core.api.layouts import Alias, Box, Elementwise, Entry, Opaque, Piece, Replicated


def capture_model(model: nn.Module, sharding: Sharding | None = None) -> dict[str, Entry]:
    """Live entries of an unwrapped model: parameters as sharded (None: whole), lowest-rank buffers.

    Names of one tensor are tied: the first has it, the others are aliases. What `state_dict` makes
    rather than holds (the `get_extra_state` of a module, tensors that a hook of the user's adds)
    and tensor subclasses are opaque. CheckpointError names a parameter that has no data yet. What is
    offloaded is read when it is written (`accel_checkpoint.deferred`).
    """
    layout = sharding or Whole()
    state = model.state_dict(keep_vars=True)  # first, for a hook on it may bring parameters back into their own form
    parameters = {id(parameter) for parameter in model.parameters()}
    buffers = {id(buffer) for buffer in model.buffers()}
    entries: dict[str, Entry] = {}
    first: dict[int, str] = {}
    for name, each in state.items():
        value = resident(each)
        if isinstance(value, torch.Tensor) and (kept := first.setdefault(id(value), name)) != name:
            entries[name] = Alias(kept)
        elif is_deferred(value):
            entries[name] = _deferred(value) if id(value) in parameters else Replicated(value)
        elif id(value) in parameters and not _is_opaque(value, layout):
            entries[name] = elementwise_entry(_ready(name, value), layout)
        elif id(value) in buffers and not _is_opaque(value, layout):
            entries[name] = Replicated(_ready(name, value).detach())
        else:
            entries[name] = _opaque(model, name, value)
    return entries


def _deferred(tensor: torch.Tensor) -> Elementwise:
    shape = tuple(tensor.shape)
    return Elementwise(shape, tensor.dtype, (Piece(Box.whole(shape), tensor),), versioned=False)


def elementwise_entry(tensor: torch.Tensor, sharding: Sharding) -> Elementwise:
    """The entry of a tensor that is laid out like a parameter."""
    extent, local = sharding.extent(tensor), sharding.local(tensor)
    parts = tuple(pieces_of(extent.boxes, local))
    return Elementwise(extent.shape, local.dtype, parts, sharding.versioned(tensor))


def _is_opaque(value: torch.Tensor, sharding: Sharding) -> bool:
    """Whether a tensor wraps others (say, quantised weights), also in its part by the sharding."""
    return hasattr(value, "__tensor_flatten__") and hasattr(sharding.local(value), "__tensor_flatten__")


def _ready(name: str, tensor: torch.Tensor) -> torch.Tensor:
    lazy = isinstance(tensor, (nn.UninitializedParameter, nn.UninitializedBuffer))
    if lazy or tensor.is_meta:
        found = "is not initialised: its module has not seen a batch yet" if lazy else "is on the meta device"
        raise CheckpointError(
            f"{name!r} was to be saved or loaded, but it {found}, so it has no data. Run a batch through the model first, or "
            f"give it memory (model.to_empty(device=...)) before prepare()."
        )
    return tensor


def _opaque(model: nn.Module, name: str, value: Any) -> Opaque:
    if isinstance(value, torch.Tensor) and hasattr(value, "__tensor_flatten__"):
        return Opaque(value.detach(), _signature(value), assign=partial(_fill, value.detach()))
    return Opaque(value, type(value).__qualname__, assign=_setter(model, name))


def _fill(tensor: torch.Tensor, value: torch.Tensor) -> None:
    tensor.copy_(value)


def _setter(model: nn.Module, name: str) -> Callable[[Any], None]:
    owner, _, last = name.rpartition(".")
    if last == "_extra_state":
        return model.get_submodule(owner).set_extra_state
    return partial(_load_one, model, name)


def _load_one(model: nn.Module, name: str, value: Any) -> None:
    # A hook of the user's made it, and another one takes it. What is made beside a parameter, not in its place, may be left.
    if name not in getattr(model.load_state_dict({name: value}, strict=False), "unexpected_keys", ()):
        return
    found = {id(each) for each in model.state_dict(keep_vars=True).values()}
    replaced = [own for own, parameter in model.named_parameters() if id(parameter) not in found]
    if replaced:
        raise CheckpointError(
            f"The state_dict() of {type(model).__name__} has {name!r}, which load_state_dict() does not take, and lacks {listed(replaced)}: that would "
            f"be lost. Give the module a hook that turns it back: register_load_state_dict_pre_hook()."
        )


def _signature(value: Any) -> str:
    kind = type(value)
    return f"{kind.__module__}:{kind.__qualname__} {tuple(value.shape)} {value.dtype}"
