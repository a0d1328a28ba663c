"""Takes structures apart: the writing half of the codec."""

from __future__ import annotations

import json
import math
from enum import Enum
from typing import Any

import torch
from torch import nn

from accel_checkpoint.codec.class_names import class_name
from accel_checkpoint.codec.numpy_types import numpy_special
from accel_checkpoint.codec.path import FIELD, ITEM, KEY, Trail, Unfit, step_into, type_name
from accel_checkpoint.codec.special_types import (
    ENUM,
    EXACT,
    PLAIN,
    SPECIALS,
    TAG,
    dtype_name,
    holds_tensor,
    is_named_tuple,
    is_plain_text,
    refusal,
)


class Encoder:
    """Takes one structure apart. `trail` is its place, or an `Unfit`'s; `tensors` are its own."""

    def __init__(self) -> None:
        self.trail = Trail()
        self.tensors: dict[str, torch.Tensor] = {}
        self._names: dict[int, str] = {}  # of tensors, by id
        self._named: list[torch.Tensor] = []  # keeps the ids theirs
        self._taken = {"__metadata__": 1}  # how often a name was asked for; this one is the file format's own

    def value(self, value: Any) -> Any:
        """The skeleton of a value; `Unfit` for what cannot be encoded."""
        kind = type(value)
        if value is None or kind is bool:
            return value
        if kind is float:
            plain = math.isfinite(value)
        elif kind is int:
            plain = -EXACT <= value <= EXACT
        else:
            plain = kind is str and is_plain_text(value)
        return value if plain else self._nested(value, kind)

    def _nested(self, value: Any, kind: type) -> Any:
        if kind is list:
            return [self._child(ITEM, index, item) for index, item in enumerate(value)]
        if kind is dict:
            return self._dict(value)
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if kind not in SPECIALS and is_named_tuple(value):
            return self._named_tuple(value, kind)
        return self._special(value, kind)

    def _child(self, style: str, step: Any, value: Any) -> Any:
        self.trail.push(style, step)
        skeleton = self.value(value)
        self.trail.pop()
        return skeleton

    def _dict(self, values: dict[Any, Any]) -> dict[str, Any]:
        if TAG not in values and all(type(key) is str and is_plain_text(key) for key in values):
            return {key: self._child(ITEM, key, value) for key, value in values.items()}
        items = []
        for key, value in values.items():
            if holds_tensor(key):
                raise Unfit("is a dict with a tensor as a key, which is found by identity only", "Give names as keys.")
            items.append([self._child(KEY, key, key), self._child(ITEM, key, value)])
        return {TAG: "dict", "items": items}

    def _named_tuple(self, value: Any, kind: type) -> dict[str, Any]:
        fields = {field: self._child(FIELD, field, item) for field, item in zip(value._fields, value, strict=True)}
        return {TAG: "namedtuple", "class": class_name(kind), "value": fields}

    def _special(self, value: Any, kind: type) -> dict[str, Any]:
        special = SPECIALS.get(kind) or (ENUM if isinstance(value, Enum) else numpy_special(value))
        if special is None:
            raise refusal(value)
        parts = zip(special.fields, special.split(value), strict=True)
        entry = {TAG: special.tag, **{name: self._child(*step_into(name), part) for name, part in parts}}
        if kind in {set, frozenset}:
            entry["items"].sort(key=json.dumps)  # hashes of strings, and so the order, differ from process to process
        return entry

    def _tensor(self, tensor: torch.Tensor) -> dict[str, Any]:
        if id(tensor) in self._names:
            return {TAG: "same", "name": self._names[id(tensor)]}
        _check_tensor(tensor)
        name = self._names[id(tensor)] = self._new_name()
        self._named.append(tensor)
        described = {"name": name, "dtype": dtype_name(tensor.dtype), "shape": list(tensor.shape)}
        requires_grad = tensor.requires_grad and tensor.is_leaf
        if type(tensor) not in PLAIN:
            return {**self._subclass(tensor, described), "requires_grad": requires_grad}
        self.tensors[name] = tensor.detach().resolve_conj().resolve_neg()
        return {TAG: PLAIN[type(tensor)], **described, "requires_grad": requires_grad}

    def _subclass(self, tensor: Any, described: dict[str, Any]) -> dict[str, Any]:
        with torch.no_grad():
            names, context = tensor.__tensor_flatten__()
        return {
            TAG: "tensor_subclass",
            **described,
            "class": class_name(type(tensor)),
            "stride": list(tensor.stride()),
            "parameter": isinstance(tensor, nn.Parameter),
            "tensors": {name: self._child(FIELD, name, getattr(tensor, name)) for name in names},
            "context": self._child(FIELD, "context", context),
        }

    def _new_name(self) -> str:
        name = self.trail.name()
        count = self._taken[name] = self._taken.get(name, 0) + 1
        return name if count == 1 else f"{name}~{count}"  # no name of a place has this character


def _check_tensor(tensor: torch.Tensor) -> None:
    kind = type(tensor)
    if kind not in PLAIN and not (hasattr(kind, "__tensor_flatten__") and hasattr(kind, "__tensor_unflatten__")):
        raise Unfit(
            f"is a {type_name(kind)}, a tensor subclass that cannot be taken apart",
            "Give a plain tensor in its place, or give the class __tensor_flatten__ and __tensor_unflatten__.",
        )
    if tensor.is_meta:
        raise Unfit("is a tensor on the meta device, which has no data", "Load or initialise it before saving.")
    if tensor.is_nested:
        raise Unfit("is a nested tensor, which a checkpoint cannot hold", "Give a list of its parts.")
    if tensor.layout != torch.strided:
        raise Unfit(f"is a tensor of layout {tensor.layout}, which a checkpoint cannot hold", "Call .to_dense() on it.")
    if tensor.is_quantized:
        raise Unfit(f"is a quantised tensor ({tensor.dtype}), which a checkpoint cannot hold", "Give its parts.")
