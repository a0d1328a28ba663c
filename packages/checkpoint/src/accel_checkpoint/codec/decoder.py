"""Puts structures together: the reading half of the codec. It checks everything that it reads."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from accel_checkpoint.codec.class_names import find_class
from accel_checkpoint.codec.numpy_types import ARRAY, SCALAR
from accel_checkpoint.codec.path import FIELD, ITEM, KEY, Trail, Unfit, shown, step_into, type_name
from accel_checkpoint.codec.special_types import ALIKE, ENUM, SPECIALS, TAG, Fields, Special, dtype_name


class Decoder:
    """Puts one structure together. `trail` is its place; after an `Unfit`, where that is from."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.trail = Trail()
        self._tensors = tensors
        self._decoded: dict[str, torch.Tensor] = {}

    def value(self, skeleton: Any) -> Any:
        """The value of a skeleton; `Unfit` for what the encoder never makes."""
        kind = type(skeleton)
        if kind is dict:
            return self._tagged(skeleton) if TAG in skeleton else self._object(ITEM, skeleton)
        if kind is list:
            return [self._child(ITEM, index, item) for index, item in enumerate(skeleton)]
        if kind is float and not math.isfinite(skeleton):
            raise Unfit(f"is {skeleton!r}, a number that JSON does not have")
        if skeleton is not None and kind not in {bool, int, float, str}:
            raise Unfit(f"is described by a {type_name(kind)}, which JSON does not have")
        return skeleton

    def _child(self, style: str, step: Any, skeleton: Any) -> Any:
        self.trail.push(style, step)
        value = self.value(skeleton)
        self.trail.pop()
        return value

    def _object(self, style: str, skeleton: dict[str, Any]) -> dict[str, Any]:
        return {key: self._child(style, key, item) for key, item in skeleton.items()}

    def _tagged(self, entry: dict[str, Any]) -> Any:
        tag = entry[TAG]
        if type(tag) is not str or tag not in _FIELDS:
            raise Unfit(
                f"is an entry {shown(tag)}, which this version of accel-core does not know",
                "Upgrade accel-core, or load another checkpoint.",
            )
        if entry.keys() - {TAG} != _FIELDS[tag].keys():
            raise Unfit(f"is a {tag} with the fields {_names(entry.keys() - {TAG})} instead of {_names(_FIELDS[tag])}")
        if tag in _OWN:
            for name, types in _FIELDS[tag].items():
                _check_part(tag, name, types, entry[name])
            return _OWN[tag](self, entry)
        return self._special(entry, _BY_TAG[tag])

    def _special(self, entry: dict[str, Any], special: Special) -> Any:
        parts = []
        for name, types in special.fields.items():
            parts.append(self._child(*step_into(name), entry[name]))
            _check_part(special.tag, name, types, parts[-1])
        try:
            return special.join(*parts)
        except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
            raise Unfit(f"is no {special.tag} ({type(error).__name__}: {error!s:.200})") from error

    def _dict(self, entry: dict[str, Any]) -> dict[Any, Any]:
        result = {}
        alike = Counter[int]()
        for number, item in enumerate(entry["items"]):
            if type(item) is not list or len(item) != 2:
                raise Unfit(f"is a dict whose item {number} is no list of a key and a value")
            key = self._child(KEY, *item[:1] * 2)
            try:
                found = hash(key)
            except TypeError as error:
                raise Unfit(f"is a dict with a {type_name(type(key))} as a key, which cannot be one") from error
            alike[found] += 1
            if alike[found] > ALIKE:
                raise Unfit(f"is a dict of which more than {ALIKE} keys have one hash")
            result[key] = self._child(ITEM, key, item[1])
        if len(result) != len(entry["items"]):
            raise Unfit("is a dict that has a key twice")
        return result

    def _named_tuple(self, entry: dict[str, Any]) -> Any:
        kind = find_class(entry["class"], tuple, "_fields", "named tuple")
        if tuple(entry["value"]) != kind._fields:
            raise Unfit(
                f"is a {entry['class']} with the fields {tuple(entry['value'])}, and that class has {kind._fields!r:.200}",
                "Give the class its fields back, or load another checkpoint.",
            )
        # Its own constructor may be the user's, and do anything.
        return tuple.__new__(kind, self._object(FIELD, entry["value"]).values())

    def _same(self, entry: dict[str, Any]) -> torch.Tensor:
        if entry["name"] not in self._decoded:
            raise Unfit(f"is the tensor {entry['name']!r:.80} once more, and none of that name was before it")
        return self._decoded[entry["name"]]

    def _tensor(self, entry: dict[str, Any]) -> torch.Tensor:
        name = self._new_name(entry)
        try:
            tensor = self._tensors[name]
        except KeyError as error:
            raise Unfit(f"is the tensor {name!r:.80}, which is not there") from error
        self._check_form(entry, tensor)
        return self._keep(entry, tensor.detach() if entry["requires_grad"] else tensor, entry[TAG] == "parameter")

    def _subclass(self, entry: dict[str, Any]) -> torch.Tensor:
        self._new_name(entry)
        _check_part("tensor_subclass", "stride", (int,), *entry["stride"])
        kind = find_class(
            entry["class"], torch.Tensor, "__tensor_unflatten__", "tensor subclass that can be put together"
        )
        inner = self._object(FIELD, entry["tensors"])
        for name, tensor in inner.items():
            if not isinstance(tensor, torch.Tensor):
                raise Unfit(f"is a {entry['class']} whose {name} is a {type_name(type(tensor))} instead of a tensor")
        context = self._child(FIELD, "context", entry["context"])
        try:
            with torch.no_grad():
                tensor = kind.__tensor_unflatten__(inner, context, torch.Size(entry["shape"]), tuple(entry["stride"]))
        except Exception as error:  # the class is the user's
            raise Unfit(f"is a {entry['class']} that cannot be put together: {error!r:.200}") from error
        if type(tensor) is not kind:
            raise Unfit(f"is a {entry['class']}, and {entry['class']} makes a {type_name(type(tensor))} of it")
        self._check_form(entry, tensor)
        return self._keep(entry, tensor, entry["parameter"])

    def _new_name(self, entry: dict[str, Any]) -> str:
        name: str = entry["name"]
        if name in self._decoded:
            raise Unfit(f"is the tensor {name!r:.80}, and there is another one of that name before it")
        return name

    def _check_form(self, entry: dict[str, Any], tensor: Any) -> None:
        found = f"a {type_name(type(tensor))}"
        if isinstance(tensor, torch.Tensor):
            found = f"{dtype_name(tensor.dtype)} {list(tensor.shape)}"
        if found != f"{entry['dtype']} {entry['shape']}":
            expected = f"{entry['dtype']} {entry['shape']}"
            raise Unfit(f"is the tensor {entry['name']!r:.80}, which should be {expected} and is {found}")

    def _keep(self, entry: dict[str, Any], tensor: torch.Tensor, parameter: bool) -> torch.Tensor:
        grad = entry["requires_grad"]
        try:
            if parameter:
                tensor = nn.Parameter(tensor, requires_grad=grad)
            elif grad:
                tensor.requires_grad_()
        except RuntimeError as error:
            raise Unfit(f"is a tensor of {entry['dtype']} that requires gradients: torch has none") from error
        self._decoded[entry["name"]] = tensor
        return tensor


_BY_TAG = {special.tag: special for special in (*SPECIALS.values(), ENUM, ARRAY, SCALAR)}

_OWN: dict[str, Callable[[Decoder, dict[str, Any]], Any]] = {
    "dict": Decoder._dict,
    "namedtuple": Decoder._named_tuple,
    "tensor": Decoder._tensor,
    "parameter": Decoder._tensor,
    "tensor_subclass": Decoder._subclass,
    "same": Decoder._same,
}

_FORM: Fields = {"name": (str,), "dtype": (str,), "shape": (list,), "requires_grad": (bool,)}
_FIELDS: dict[str, Fields] = {
    **{tag: special.fields for tag, special in _BY_TAG.items()},
    "dict": {"items": (list,)},
    "namedtuple": {"class": (str,), "value": (dict,)},
    "tensor": _FORM,
    "parameter": _FORM,
    "tensor_subclass": {
        **_FORM,
        "class": (str,),
        "stride": (list,),
        "parameter": (bool,),
        "tensors": (dict,),
        "context": (),
    },
    "same": {"name": (str,)},
}


def _names(names: Iterable[str]) -> str:
    return ", ".join(sorted(map(str, names))) or "none"


def _check_part(tag: str, name: str, types: tuple[type, ...], *parts: Any) -> None:
    for part in parts:
        if types and type(part) not in types:
            expected = " or ".join(type_name(kind) for kind in types)
            raise Unfit(f"is a {tag} whose {name} is {shown(part)} instead of a {expected}")
