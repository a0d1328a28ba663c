"""Optimizer state of one parameter as checkpoint entries, and tensors to read these into."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from accel_checkpoint.optimizers.known_optimizers import (
    COUNTER,
    ELEMENTWISE,
    REPLICATED,
    is_known,
    is_spanning,
    layouts_of,
)
from accel_checkpoint.optimizers.sharding import Extent, Sharding, pieces_of
from accel_core import CheckpointError
from accel_core.api.checkpoint import WHOLE, SavedEntry
from accel_core.api.component import flatten, map_tensors
from accel_core.api.layouts import Box, Elementwise, Entry, Opaque, Replicated

Shape = tuple[int, ...]
Read = Callable[[Entry], Any]


class Layouts:
    """The layout of an optimizer's state: as declared for its keys, by its parameters' sharding."""

    def __init__(self, optimizer: Any, sharding: Sharding) -> None:
        self.declared = layouts_of(optimizer)
        self.known = is_known(optimizer)
        self.sharding = sharding
        self._extents: tuple[Extent, ...] | None = None
        if is_spanning(optimizer):
            groups = optimizer.param_groups
            self._extents = tuple(sharding.extent(parameter) for group in groups for parameter in group["params"])

    def of(self, name: str, parameter: torch.Tensor) -> ParameterState:
        """The state of one parameter."""
        extent = self.sharding.extent(parameter)
        return ParameterState(name, parameter, extent, part_of(self._extents or (extent,)), self)


class ParameterState(NamedTuple):
    """The state of one parameter, of which this rank has `extent`; `part` is that as text."""

    name: str
    parameter: torch.Tensor
    extent: Extent
    part: str
    layouts: Layouts

    @property
    def is_cut(self) -> bool:
        """Whether this rank has only a part of it, or of parameters that its state describes."""
        return self.part != WHOLE

    def is_opaque(self, state: Mapping[Any, Any]) -> bool:
        """Whether the values must stay together: an unknown optimizer has undeclared tensors."""
        if any(not isinstance(key, str) or "/" in key for key in state):
            return True
        undeclared = (value for key, value in state.items() if key not in self.layouts.declared)
        return not self.layouts.known and any(map(has_tensors, undeclared))

    def entry(self, key: str, value: Any) -> Entry:
        """An entry for a value that holds tensors; raises if it is not laid out as declared."""
        layout = self.layouts.declared.get(key)
        if layout == ELEMENTWISE and isinstance(value, torch.Tensor):
            local = self.layouts.sharding.local(value)
            if _is_plain(local):
                self._check_shape(key, local)
                parts = tuple(pieces_of(self.extent.boxes, local))
                return Elementwise(self.extent.shape, local.dtype, parts, self.layouts.sharding.versioned(value))
        elif layout is not None and _is_plain(value) and self._is_replicated(layout, value.numel()):
            return Replicated(value.detach())
        return self.opaque({key: value})

    def opaque(self, state: Mapping[Any, Any]) -> Opaque:
        """Values that are saved whole, and together."""
        laid_out = [key for key, value in state.items() if self._is_laid_out(value)]
        values = {key: self.layouts.sharding.local(value) if key in laid_out else value for key, value in state.items()}
        value = {"state": values, "laid_out": laid_out}
        return Opaque(value, f"{self._signature}{signature_of(values)}", self.part)

    def refuses(self, key: str | None, saved: SavedEntry, here: Entry | None) -> str | None:
        """The reason why a saved entry, of a key or all (None), does not fit; None if it does."""
        if saved.kind == "opaque":
            return self._refuses_opaque(saved.signatures, here)
        if saved.kind == "elementwise":
            if tuple(saved.shape) == self.extent.shape:
                return None
            return f"has the shape {list(saved.shape)}, and the parameter has {list(self.extent.shape)}"
        layout = self.layouts.declared.get(key or "", REPLICATED)
        if self._is_replicated(layout, math.prod(saved.shape)):
            return None
        return f"was computed over the whole parameter, of which this rank has {self.part}"

    def read(self, key: str | None, saved: SavedEntry, group: Mapping[str, Any], read: Read) -> dict[Any, Any]:
        """The state from an entry of a checkpoint, in new tensors; `key` None: the whole state."""
        if saved.kind == "opaque":
            return self._opened(read(Opaque(None, saved.signatures[self.part], self.part)), group)
        assert key is not None
        assert saved.dtype is not None
        if saved.kind == "elementwise":
            value = self.layouts.sharding.empty(self.parameter, key, saved.dtype)
            pieces = pieces_of(self.extent.boxes, self.layouts.sharding.local(value))
            read(Elementwise(self.extent.shape, saved.dtype, tuple(pieces)))
            return {key: value}
        device = self._place(key, group)
        value = torch.empty(saved.shape, dtype=saved.dtype, device=device)
        read(Replicated(value))
        # Kernels that read the number of steps on the device take it as this only.
        return {key: value if device is None or not self._is_counter(key) else value.to(torch.float32)}

    def _opened(self, value: Any, group: Mapping[str, Any]) -> dict[Any, Any]:
        state = {key: self._placed(key, item, group) for key, item in value["state"].items()}
        for key in value["laid_out"]:
            state[key] = self.layouts.sharding.like(self.parameter, state[key])
        return state

    def _placed(self, key: Any, value: Any, group: Mapping[str, Any]) -> Any:
        device = self._place(key, group)
        return value if device is None else map_tensors(lambda tensor: tensor.to(device), value)

    def _check_shape(self, key: str, local: torch.Tensor) -> None:
        expected = self.layouts.sharding.local(self.parameter).shape
        if local.shape != expected:
            raise CheckpointError(
                f"The optimizer's {key!r} of {self.name!r} was declared to be laid out like the parameter, but here it has the shape "
                f"{list(local.shape)} and the parameter has {list(expected)}. Leave it out of accel_layouts: it is saved whole then."
            )

    def _is_replicated(self, layout: str, numel: int) -> bool:
        if not self.is_cut or layout == COUNTER:
            return True
        return layout == REPLICATED and numel == 1

    def _is_laid_out(self, value: Any) -> bool:
        # Under a sharded parameter an optimizer's tensors are of the same class: wrappers that are nobody's data by themselves.
        kind = type(self.parameter.detach())
        return kind is not torch.Tensor and type(value) is kind and value.shape == self.parameter.shape

    def _refuses_opaque(self, signatures: Mapping[str, str], here: Entry | None) -> str | None:
        if self.part not in signatures:
            parts = ", ".join(sorted(signatures)[:_LISTED])
            return f"cannot be cut: this rank has {self.part} of the parameter, and the checkpoint has {parts}"
        signature = signatures[self.part]
        if not signature.startswith(self._signature):
            return f"is of another parameter: here it is {self._signature}…, and the checkpoint has {signature}"
        if isinstance(here, Opaque) and here.signature != signature:
            return f"is of another kind: here it is {here.signature}, and the checkpoint has {signature}"
        return None

    @property
    def _signature(self) -> str:
        return f"of {list(self.extent.shape)}: "

    def _is_counter(self, key: Any) -> bool:
        return self.layouts.declared.get(key, COUNTER if key == "step" else None) == COUNTER

    def _place(self, key: Any, group: Mapping[str, Any]) -> torch.device | None:
        """The device for a value, as in torch's `load_state_dict`; None for CPU memory."""
        on_device = not self._is_counter(key) or group.get("capturable") or group.get("fused")
        return self.parameter.device if on_device else None


_LISTED = 8  # parts in one message


def has_tensors(value: Any) -> bool:
    """Whether a nested structure holds a tensor."""
    return isinstance(value, torch.Tensor) or any(isinstance(leaf, torch.Tensor) for leaf in flatten(value)[0])


def part_of(extents: Sequence[Extent]) -> str:
    """The text for parts of parameters: "whole" if it is all, else such as "[0:4, 0:8]"."""
    if all(extent.boxes == (Box.whole(extent.shape),) for extent in extents):
        return WHOLE
    return " and ".join(" + ".join(map(str, extent.boxes)) or "nothing" for extent in extents)


def signature_of(value: Any) -> str:
    """The text that equal opaque values share: classes, shapes, dtypes, keys; no list lengths."""
    if isinstance(value, Mapping):
        items = sorted(value.items(), key=lambda item: str(item[0]))
        return "; ".join(f"{key}={signature_of(item)}" for key, item in items)
    if not isinstance(value, torch.Tensor):
        return type(value).__name__ if has_tensors(value) else "value"
    flatten = getattr(value, "__tensor_flatten__", None)
    if flatten is None:
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    parts = ", ".join(f"{name}={signature_of(getattr(value, name))}" for name in flatten()[0])
    return f"{type(value).__module__}:{type(value).__qualname__}({parts})"


def _is_plain(value: Any) -> bool:
    return type(value) in {torch.Tensor, torch.nn.Parameter} and value.layout is torch.strided
