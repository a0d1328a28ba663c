"""Targets of weights that are read: tensors of a model in memory, or entries of a sharded model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from accel_checkpoint.weights.sources import CALL
from accel_checkpoint.weights.tensor_files import storage_key
from accel_core.api.component import listed
from accel_core.api.layouts import Alias, Box, Elementwise, Entry, Opaque, Piece, State


class Slot(NamedTuple):
    """A tensor of the model to fill, with all its names in the model; files need one of them."""

    names: tuple[str, ...]
    shape: tuple[int, ...] = ()
    dtype: torch.dtype | None = None
    pieces: tuple[Piece, ...] = ()
    tensors: tuple[torch.Tensor, ...] = ()
    obstacle: str | None = None


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside a compiled or data-parallel wrapper."""
    inner = getattr(model, "_orig_mod", model)
    if isinstance(inner, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
        inner = inner.module
    found: nn.Module = getattr(inner, "_orig_mod", inner)
    return found


def check_memory(model: nn.Module) -> None:
    """Raises `ValueError` if tensors of the model are on the meta device."""
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    meta = [name for name, tensor in named.items() if tensor.is_meta]
    if meta:
        raise ValueError(
            f"{CALL} fills the memory of a model, but {len(meta)} of the {len(named)} tensors of {type(model).__name__} are on "
            f"the meta device and have none: {listed(meta)}. Call model.to_empty(device=...) first."
        )


def slots_in(model: nn.Module) -> list[Slot]:
    """One for each memory that the state dict shows, in its order."""
    owned = _owned(model)
    by_memory: dict[Any, list[str]] = {}
    for name in model.state_dict():
        by_memory.setdefault(_memory(owned.get(name), name), []).append(name)
    return [_whole(tuple(names), _distinct(owned, names)) for names in by_memory.values()]


def slots_of(state: State) -> list[Slot]:
    """One for each entry, with its aliases."""
    names: dict[str, list[str]] = {}
    for name, entry in state.items():
        names.setdefault(entry.of if isinstance(entry, Alias) else name, []).append(name)
    return [_of_entry(state[kept], tuple(every)) for kept, every in names.items()]


def moved(model: nn.Module, slots: Iterable[Slot], device: torch.device) -> list[Slot]:
    """Moves the model and its ties, also of parameters that share only memory; the new slots."""
    model.to(device)
    owned = _owned(model)
    found = [_whole(slot.names, _distinct(owned, slot.names)) for slot in slots]
    for slot in found:
        for tensor in slot.tensors[1:]:
            tensor.data = slot.tensors[0].data
    return found


def _whole(names: tuple[str, ...], tensors: tuple[torch.Tensor, ...]) -> Slot:
    obstacle = _obstacle(tensors[0] if tensors else None)
    if obstacle is not None:
        return Slot(names, tensors=tensors, obstacle=obstacle)
    shape = tuple(tensors[0].shape)
    return Slot(names, shape, tensors[0].dtype, (Piece(Box.whole(shape), tensors[0]),), tensors)


def _of_entry(entry: Entry, names: tuple[str, ...]) -> Slot:
    if isinstance(entry, Elementwise):
        return Slot(names, entry.shape, entry.dtype, entry.pieces)
    if isinstance(entry, Opaque):
        value = entry.value
        return Slot(names, obstacle=_obstacle(value if isinstance(value, torch.Tensor) else None))
    assert not isinstance(entry, Alias), "an alias stands beside the entry that it is another name of"
    return _whole(names, (entry.data,))


def _owned(model: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers(remove_duplicate=False))}


def _distinct(owned: Mapping[str, torch.Tensor], names: Iterable[str]) -> tuple[torch.Tensor, ...]:
    return tuple({id(owned[name]): owned[name] for name in names if name in owned}.values())


def _memory(tensor: torch.Tensor | None, name: str) -> Any:
    if tensor is None:
        return name
    return id(tensor) if _obstacle(tensor) else storage_key(tensor)


def _obstacle(tensor: torch.Tensor | None) -> str | None:
    """The reason why values cannot be copied into a tensor of the model; None if they can."""
    if tensor is None:
        return "neither a parameter nor a buffer of the model, which fills it by its own load_state_dict"
    if hasattr(tensor, "__tensor_flatten__") or tensor.layout != torch.strided:
        return f"a {type(tensor.data).__name__} of layout {tensor.layout} in the model"
    return None
