"""Configurations as data of JSON, which people read where runs are recorded."""

from __future__ import annotations

import dataclasses
from argparse import Namespace
from collections.abc import Mapping
from enum import Enum
from numbers import Integral
from types import SimpleNamespace
from typing import Any

import torch

from accel_trackers.recording.values import PLAIN, clean, fits, is_array, plain_value, said

_DEEPEST = 50  # containers in each other; what lies deeper, or contains itself, is "…"
_MOST_ELEMENTS = 64  # of a tensor or an array that is written out
_MOST_CHARACTERS = 2000  # of the text for an object


def readable_config(config: object) -> dict[str, Any]:
    """A configuration as JSON has it: a dict with texts as keys, of plain values, lists and dicts.

    Mappings, dataclasses, named tuples, namespaces and models of pydantic become dicts, as do the
    attributes of any other object that is the whole of the configuration. Small tensors and arrays
    become lists; other objects, and integers beyond 64 bits, become texts by `str`.
    Never raises: what cannot be read is a text that says so.
    """
    found = _data(config, ())
    if isinstance(found, str) and not isinstance(config, (str, type, Mapping)) and hasattr(config, "__dict__"):
        public = {name: value for name, value in vars(config).items() if not str(name).startswith("_")}
        found = _data(public, ()) or found
    return found if isinstance(found, dict) else {} if config is None else {"config": found}


def _data(value: Any, above: tuple[int, ...]) -> Any:
    """The data of a value; `above`: the ids of the containers around it."""
    try:
        value = value.value if isinstance(value, Enum) else value
        if isinstance(value, torch.Tensor) or (is_array(value) and hasattr(value, "tolist")):
            value = _elements(value)
        value = str(int(value)) if isinstance(value, Integral) and not fits(int(value)) else plain_value(value)
        if value is None or type(value) in PLAIN:
            return value
        if id(value) in above or len(above) >= _DEEPEST:
            return "…"
        above, fields = (*above, id(value)), _fields(value)
        if fields is not None:
            return _dict(fields, above)
        if isinstance(value, (list, tuple, set, frozenset)):
            found = [_data(each, above) for each in value]
            return sorted(found, key=str) if isinstance(value, (set, frozenset)) else found
        return clean(str(value)[:_MOST_CHARACTERS])
    except Exception as error:  # noqa: BLE001  (whatever the user's objects raise: no run is lost over its description)
        return f"<{type(value).__qualname__} that cannot be read: {said(error)}>"


def _fields(value: Any) -> Mapping[Any, Any] | None:
    """Names and values of what has fields."""
    if isinstance(value, Mapping):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {each.name: getattr(value, each.name, "<not set>") for each in dataclasses.fields(value)}
    if isinstance(value, (Namespace, SimpleNamespace)):
        return vars(value)
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return value._asdict()  # type: ignore[no-any-return]
    return value.model_dump(warnings=False) if hasattr(value, "model_dump") else None


def _dict(fields: Mapping[Any, Any], above: tuple[int, ...]) -> dict[str, Any]:
    data: dict[str, Any] = {}
    for key, value in fields.items():
        name = clean(key) if isinstance(key, str) else str(_data(key, ()))
        while name in data:  # of another key: nothing gets lost
            name = f"{name} ({len(data) + 1})"
        data[name] = _data(value, above)
    return data


def _elements(value: Any) -> Any:
    """The elements of a small local tensor or array; else a text. No collective."""
    is_here = not isinstance(value, torch.Tensor) or (type(value) in {torch.Tensor, torch.nn.Parameter})
    size = value.numel() if isinstance(value, torch.Tensor) else value.size
    if is_here and size <= _MOST_ELEMENTS:
        return value.tolist()
    return f"{type(value).__name__}(shape={tuple(value.shape)}, dtype={value.dtype})"
