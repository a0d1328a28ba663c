"""How parameters are cut over the mesh, and copies of them on the host, for checkpoints.

One process has all devices of the mesh, so it has all parts of each tensor. A checkpoint is written
from copies on the host, made part by part, and read into such copies.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from accel_checkpoint import Whole, capture_model
from accel_core.api.checkpoint import memory_of
from accel_core.api.component import map_tensors
from accel_core.api.layouts import Elementwise, Entry, Opaque, Replicated

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from accel_xla.engine import Engine


def cut_dim(shape: tuple[int, ...], parts: int) -> int | None:
    """The dim that is cut: the largest that `parts` divide; None: the tensor stays whole."""
    fitting = [dim for dim, size in enumerate(shape) if size and size % parts == 0]
    return max(fitting, key=lambda dim: shape[dim], default=None)


def spec_of(engine: Engine, shape: tuple[int, ...]) -> tuple[Any, ...]:
    """How a parameter of this shape lies on the mesh: for each dim the axis that divides it."""
    dim = cut_dim(shape, engine.shard) if engine.shard > 1 else None
    return tuple("shard" if index == dim else None for index in range(len(shape)))


def shard_like(engine: Engine, tensor: torch.Tensor) -> None:
    """Has a tensor lie on the mesh as a parameter of its shape; whole ones are on every device.

    On a mesh of one device too: torch_xla marks what a graph returns, and the second step would be another graph.
    """
    if tensor.dim() and tensor.numel() and not engine.is_marked(tensor):
        engine.mark(tensor, spec_of(engine, tuple(tensor.shape)))


class HostCopies(Whole):
    """A `Sharding` whose local tensors are copies on the host of whole parameters."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def local(self, value: torch.Tensor) -> torch.Tensor:
        """A copy on the host."""
        return self._engine.host_copy(value)

    def versioned(self, value: torch.Tensor) -> bool:  # noqa: ARG002
        """Nothing changes a copy."""
        return False


class HostMoments(HostCopies):
    """The same for the state of optimizers, which moves to the mesh before the next step."""

    def local(self, value: torch.Tensor) -> torch.Tensor:
        """A copy on the host; of a parameter itself, of which only the shape is asked here, none."""
        return value.detach() if isinstance(value, torch.nn.Parameter) else super().local(value)

    def empty(self, parameter: torch.Tensor, key: str, dtype: torch.dtype) -> torch.Tensor:  # noqa: ARG002
        """A new tensor on the host."""
        return torch.empty(parameter.shape, dtype=dtype)


def on_host(engine: Engine, entries: Mapping[str, Entry]) -> Iterator[tuple[str, Entry]]:
    """The entries, with everything that is still on the mesh copied to the host."""
    for name, entry in entries.items():
        if isinstance(entry, Replicated):
            yield name, Replicated(engine.host_copy(entry.data))
        elif isinstance(entry, Opaque):
            yield name, replace(entry, value=map_tensors(engine.host_copy, entry.value))
        else:
            yield name, entry


class ModelCopies:
    """The copies of models that were named last, for `model_loaded`, as long as whoever loads holds them."""

    def __init__(self) -> None:
        self._held: weakref.WeakKeyDictionary[nn.Module, weakref.WeakValueDictionary[str, torch.Tensor]]
        self._held = weakref.WeakKeyDictionary()

    def capture(self, engine: Engine, model: nn.Module) -> dict[str, Entry]:
        """Copies a model to the host."""
        state = dict(on_host(engine, capture_model(model, HostCopies(engine))))
        held = self._held[model] = weakref.WeakValueDictionary()
        for name, entry in state.items():
            if isinstance(entry, (Elementwise, Replicated)):
                held[name] = memory_of(entry)[0]
        return state

    @torch.no_grad()
    def load(self, engine: Engine, model: nn.Module) -> None:
        """Puts what was read into the copies on the mesh."""
        live = model.state_dict(keep_vars=True)
        for name, value in self._held.pop(model).items():
            put(engine, live[name], value)
        engine.sync()


def put(engine: Engine, target: torch.Tensor, value: torch.Tensor) -> None:
    """Gives a tensor on the mesh the values of one on the host, in place."""
    placed = value.to(engine.device)
    if engine.is_marked(target):
        shard_like(engine, placed)
    target.copy_(placed)


def place_moments(engine: Engine, optimizer: Optimizer) -> None:
    """Has an optimizer's state lie on the mesh as its parameters do, also what was read into the host."""
    states: Iterable[tuple[Any, Any]] = optimizer.state.items()  # some optimizers keep state under names too
    for parameter, state in states:
        if not _is_on_mesh(parameter):
            continue
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and value.dim():
                state[key] = value = value.to(parameter.device)
                if value.shape == parameter.shape:
                    shard_like(engine, value)


def begin_moments(engine: Engine, optimizer: Any) -> None:
    """Has an optimizer of torch make its first state now, as data and not as a part of the first graph.

    The first step would be a graph of its own otherwise, and the model be compiled twice. What torch's
    optimizers make lazily in `_init_group` are constants, which are computed here by themselves.
    """
    collect = getattr(optimizer, "_init_group", None)
    if collect is None or optimizer.state:
        return
    import inspect

    lists = len(inspect.signature(collect).parameters) - 1
    for group in optimizer.param_groups:
        collect(group, *([] for _ in range(lists)))
    places = [(state, key) for state in optimizer.state.values() for key, value in state.items() if _is_on_mesh(value)]
    copies = engine.host_copies([state[key] for state, key in places])
    for (state, key), copy in zip(places, copies, strict=True):
        state[key] = copy.to(engine.device)


def _is_on_mesh(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == "xla"
