"""The data for repeating a forward: inputs, random streams, buffers, and output gradients.

Inputs and buffers are kept by reference. A buffer that the forward changes in place (running
statistics) is copied before: which these are is seen at the first forward, for which all are.
"""

from __future__ import annotations

import dataclasses
import random
import sys
import weakref
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

if TYPE_CHECKING:
    from accel_core import Rows
    from accel_core.api.diagnostics import Drawn
    from accel_diagnostics import NonFiniteDetector

Named = tuple[str, torch.Tensor]


@dataclass(eq=False)
class Forward:
    """One forward of a watched model."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    versions: list[int]  # of the input tensors; another one later means that they were changed in place
    streams: Streams  # before it, as the buffers
    buffers: Buffers
    autocast: tuple[bool, torch.dtype, bool]  # enabled, dtype, and whether casts of weights are kept
    turn: int = 0  # how many backwards had run before it, in this process
    window: int = 0  # how many windows had closed
    drawn: list[tuple[Drawn, Rows | None]] = field(default_factory=list)  # the batches that were being used
    finite: torch.Tensor | None = None  # whether its outputs were, 0-d on the device; None until it has ended
    # By turn, what arrived at its floating outputs, by their number.
    gradients: dict[int, dict[int, torch.Tensor]] = field(default_factory=dict)
    handles: list[Any] = field(default_factory=list)  # hooks on its outputs
    graphs: list[weakref.ref[Any]] = field(default_factory=list)  # these hooks, which live as long as the graphs

    @property
    def has_lost_graph(self) -> bool:
        """Whether no backward can reach it any more."""
        return bool(self.graphs) and all(graph() is None for graph in self.graphs)

    def let_go(self) -> None:
        """Takes the hooks off the outputs, which the user may keep."""
        for handle in self.handles:
            handle.remove()


class Watcher:
    """The hooks on one model. A copy or pickle of the model takes along one that does nothing."""

    def __init__(self, detector: NonFiniteDetector | None = None, model: nn.Module | None = None) -> None:
        self._detector = None if detector is None else weakref.ref(detector)
        self._model = None if model is None else weakref.ref(model)
        self._open: Forward | None = None
        self._changing: set[str] | None = None  # the buffers that forwards change; None: not seen yet
        self._compiled: Any = None
        self._around: Any = None
        self._handles: list[Any] = []
        if model is not None and model._compiled_call_impl is not None:
            self._stand_around(model)
        elif model is not None:
            before = model.register_forward_pre_hook(self.before, with_kwargs=True)
            self._handles = [before, model.register_forward_hook(self.after, with_kwargs=True)]

    def _stand_around(self, model: nn.Module) -> None:
        """Replaces what calls the compiled code, for hooks would be compiled with the model."""
        compiled: Any = model._compiled_call_impl
        before, after = torch.compiler.disable(self.before), torch.compiler.disable(self.after)

        def around(*args: Any, **kwargs: Any) -> Any:
            before(model, args, kwargs)
            output = compiled(*args, **kwargs)
            after(model, args, kwargs, output)
            return output

        vars(around).update(vars(compiled))  # by which it is known, and what was there before it is found again
        self._compiled, self._around = compiled, around
        model._compiled_call_impl = around

    def watches(self, model: nn.Module) -> bool:
        """Whether these are the hooks on this model."""
        return self._model is not None and self._model() is model

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters of the model, by name."""
        model = None if self._model is None else self._model()
        return iter(()) if model is None else model.named_parameters()

    def remove(self) -> None:
        """Takes the hooks off."""
        for handle in self._handles:
            handle.remove()
        model: Any = None if self._model is None else self._model()
        if model is not None and self._around is not None and model._compiled_call_impl is self._around:
            model._compiled_call_impl = self._compiled

    def before(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A forward begins."""
        detector = self._active(model)
        if detector is None or not (model.training and torch.is_grad_enabled()):
            self._open = None
            return
        device, kind = detector.device, detector.device.type
        casts = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled()
        streams, buffers = Streams.take(device), Buffers(model, self._changing)
        self._open = Forward(model, args, kwargs, versions_of((args, kwargs)), streams, buffers, casts)
        detector.record(self._open)

    def after(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:  # noqa: ARG002
        """A forward has ended."""
        forward, self._open = self._open, None
        detector = self._active(model)
        if forward is None or detector is None:
            return
        self._changing = (self._changing or set()) | forward.buffers.changed()
        outputs = [tensor for _, tensor in floating(output)]
        flags = [torch.isfinite(tensor.detach()).all() for tensor in outputs]
        forward.finite = torch.stack([flag.to(flags[0].device) for flag in flags]).all() if flags else None
        for number, tensor in enumerate(outputs):
            if tensor.requires_grad:
                hook = _keep(weakref.ref(forward), detector, number)
                forward.handles.append(tensor.register_hook(hook))
                forward.graphs.append(weakref.ref(hook))

    def _active(self, model: nn.Module) -> NonFiniteDetector | None:
        detector = None if self._detector is None else self._detector()
        return None if detector is None or detector.replaying or not self.watches(model) else detector

    def __reduce__(self) -> tuple[type[Watcher], tuple[()]]:
        return Watcher, ()


def _keep(forward: weakref.ref[Forward], detector: NonFiniteDetector, number: int) -> Any:
    observer = weakref.ref(detector)

    def arrived(gradient: torch.Tensor) -> None:
        record, watching = forward(), observer()
        if record is not None and watching is not None and watching.in_backward:
            record.gradients.setdefault(watching.turn, {})[number] = gradient.detach()

    return arrived


class Streams(NamedTuple):
    """The states of the random streams from which a forward may draw."""

    place: torch.device
    python: Any
    numpy: Any  # None if the process has not imported it
    cpu: torch.Tensor
    device: torch.Tensor | None  # of the place, if it is no CPU

    @classmethod
    def take(cls, device: torch.device) -> Streams:
        """The present states of the random streams."""
        numpy = sys.modules.get("numpy")
        of_numpy = None if numpy is None else numpy.random.get_state()
        of_device = None if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device)
        return cls(device, random.getstate(), of_numpy, torch.get_rng_state(), of_device)

    def restore(self) -> None:
        """Puts them back."""
        random.setstate(self.python)
        if self.numpy is not None:
            sys.modules["numpy"].random.set_state(self.numpy)
        torch.set_rng_state(self.cpu)
        if self.device is not None:
            torch.get_device_module(self.place).set_rng_state(self.device, self.place)


class Buffers:
    """The buffers of a model at one moment; `changing`: names of those to copy, None: all."""

    def __init__(self, model: nn.Module, changing: set[str] | None = None) -> None:
        held = dict(model.named_buffers())
        self._held = {name: (buffer, version_of(buffer)) for name, buffer in held.items()}
        self._copies = {
            name: buffer.detach().clone() for name, buffer in held.items() if changing is None or name in changing
        }

    def changed(self) -> set[str]:
        """The names of those whose contents were changed in place since."""
        return {name for name, (buffer, version) in self._held.items() if version_of(buffer) != version}

    def restore(self, model: nn.Module) -> None:
        """Puts them back. One that was replaced by another tensor is the old one again."""
        for name, (buffer, _) in self._held.items():
            path, _, leaf = name.rpartition(".")
            owner = model.get_submodule(path)
            if owner._buffers.get(leaf) is not buffer:
                owner._buffers[leaf] = buffer
            if name in self._copies:
                with torch.no_grad():
                    buffer.copy_(self._copies[name])


def floating(value: Any, name: str = "") -> Iterator[Named]:
    """Floating and complex tensors inside a value, each with its place; enters dataclasses."""
    if isinstance(value, torch.Tensor):
        if can_be_looked_at(value):
            yield name, value
    elif isinstance(value, Mapping):
        for key, child in value.items():
            yield from floating(child, f"{name}[{key!r}]")
    elif isinstance(value, (list, tuple)):
        fields = getattr(value, "_fields", None)
        for index, child in enumerate(value):
            yield from floating(child, f"{name}.{fields[index]}" if fields else f"{name}[{index}]")
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for each in dataclasses.fields(value):
            yield from floating(getattr(value, each.name), f"{name}.{each.name}")


def can_be_looked_at(tensor: torch.Tensor) -> bool:
    """Whether torch can tell that its values are finite: not of sparse, nested or 8-bit ones."""
    has_kind = tensor.is_complex() or (tensor.is_floating_point() and tensor.dtype.itemsize > 1)
    return has_kind and tensor.layout is torch.strided and not tensor.is_nested


def version_of(tensor: torch.Tensor) -> int:
    """The number of in-place changes of a tensor; 0 for one of inference mode."""
    return 0 if tensor.is_inference() else tensor._version


def versions_of(value: Any) -> list[int]:
    """The number of in-place changes of each floating or complex tensor inside."""
    return [version_of(tensor) for _, tensor in floating(value)]


def autocast_of(forward: Forward) -> AbstractContextManager[Any]:
    """The autocast state in which a forward ran."""
    enabled, dtype, cached = forward.autocast
    return torch.autocast(forward.streams.place.type, dtype=dtype, enabled=enabled, cache_enabled=cached)
