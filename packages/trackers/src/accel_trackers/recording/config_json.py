"""Configurations of any kind, made into what JSON has, so that people can read them where runs are recorded."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import json
import operator
import os
import re
import warnings
from argparse import Namespace
from collections import deque
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence, Set
from datetime import date, time, timedelta
from enum import Enum
from functools import partial
from numbers import Integral, Number
from types import MemberDescriptorType, ModuleType, SimpleNamespace
from typing import Any

import torch

from accel_trackers.recording.scalars import as_array, clean, fits, is_array, plain_value, said, written

DEEPEST = 50
"""How many containers may stand in each other; what lies deeper is "…"."""

_MOST_ELEMENTS = 64  # of a tensor or an array that is written out
_MOST_ITEMS = 1000  # of a sequence that is no list, and may compute its items
_MOST_CHARACTERS = 2000  # of the text for an object
_MORE = "…"
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")

_OPAQUE = object()
"""What JSON has for an object that is none of the kinds known here: nothing."""

_Pairs = Collection[tuple[Any, Callable[[], Any]]]
"""Names and what reads their values, which may raise."""


def readable_config(config: object) -> dict[str, Any]:
    """A configuration as JSON has it: None, booleans, numbers (also nan and inf), texts, lists, and dicts with texts as keys.

    It may be a dict or another mapping, None, a dataclass, a namespace, a namedtuple, a model of pydantic or attrs, a class, or an object
    with attributes, of which those count that have no leading underscore. Anything else is stored by the name "config".

    Inside of it, whatever has fields becomes a dict; lists, tuples and sets become lists; members of an `Enum` their value, or their name
    where that is no number or text; small tensors and arrays lists, larger ones a text with their shape; classes and functions their
    qualified name; a `timedelta` seconds; other objects what `repr` says, without addresses. What JSON has already is not changed, but for
    integers that do not fit into 64 bits, which no service holds: they become texts. Data that contain themselves are cut by "…". A key
    that reads as another one does gets a number behind it.

    Never raises: what cannot be read is a text that says so.
    """
    if config is None:
        return {}
    try:
        pairs = _fields(config)
        if pairs is None and (isinstance(config, type) or _known(config, ()) is _OPAQUE):
            pairs = _attributes(config) or None
        return {"config": _data(config, ())} if pairs is None else _dict(pairs, (id(config),))
    except Exception as error:  # noqa: BLE001  (whatever the user's objects raise: no run is lost over its description)
        return {"config": _unreadable(config, error)}


def _data(value: Any, above: tuple[int, ...]) -> Any:
    """The JSON form of a value; `above`: the ids of the containers that it is in."""
    try:
        data = _known(value, above)
        return _cut(_ADDRESS.sub("", repr(value))) if data is _OPAQUE else data
    except Exception as error:  # noqa: BLE001  (see `readable`)
        return _unreadable(value, error)


def _known(value: Any, above: tuple[int, ...]) -> Any:
    if value is None or isinstance(value, (bool, str, int, float, Enum)):
        return _scalar(value)
    if id(value) in above or len(above) >= DEEPEST:
        return _MORE
    within = (*above, id(value))
    pairs = _fields(value)
    if pairs is not None:
        return _dict(pairs, within)
    if isinstance(value, torch.Tensor) or is_array(value):
        return _elements(value, within)
    items = _items(value)
    if items is not None:
        return [_data(each, within) for each in items]
    if isinstance(value, Set):
        return _sorted([_data(each, within) for each in value])
    return _single(value)


def _scalar(value: Any) -> Any:
    if isinstance(value, Enum):
        is_plain = value.value is None or isinstance(value.value, (bool, str, int, float, Enum))
        return _scalar(value.value) if is_plain else value.name
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, Integral):
        number = int(value)
        return number if fits(number) else written(number)
    return plain_value(value)


def _fields(value: Any) -> _Pairs | None:
    """The fields of a value whose type declares that it has some; None for others."""
    kind = type(value)
    names: Iterable[str]
    if isinstance(value, Mapping) or (hasattr(kind, "keys") and hasattr(kind, "__getitem__") and not is_array(value)):
        return [(key, partial(operator.getitem, value, key)) for key in value.keys()]  # noqa: SIM118  (not all iterate over keys)
    if dataclasses.is_dataclass(kind):
        names = [each.name for each in dataclasses.fields(value)]
    elif isinstance(value, tuple) and hasattr(kind, "_asdict"):
        names = kind._fields
    elif isinstance(value, (Namespace, SimpleNamespace)):
        names = vars(value)
    elif hasattr(kind, "__attrs_attrs__"):
        names = [each.name for each in kind.__attrs_attrs__]
    elif callable(getattr(kind, "model_dump", None)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of values of other types than declared, which are read nevertheless
            return _fields(value.model_dump())
    else:
        return None
    return [(name, partial(getattr, value, name)) for name in names]


def _attributes(value: Any) -> _Pairs:
    """The attributes of an object or class: no methods, properties or leading underscores."""
    names: dict[str, None] = {}
    for kind in reversed(value.__mro__ if isinstance(value, type) else type(value).__mro__):
        for name, each in vars(kind).items():
            is_slot = isinstance(each, MemberDescriptorType) and not isinstance(value, type)
            if is_slot or not (hasattr(type(each), "__get__") or kind is object):
                names[name] = None
    names |= dict.fromkeys(getattr(value, "__dict__", {})) if not isinstance(value, type) else {}
    return [(name, partial(getattr, value, name)) for name in names if not name.startswith("_")]


def _dict(pairs: _Pairs, within: tuple[int, ...]) -> dict[str, Any]:
    taken = {key for key, _ in pairs if type(key) is str}  # these keep their names
    data: dict[str, Any] = {}
    for key, read in pairs:
        name = clean(key) if type(key) is str else _free(_name(key), taken)
        taken.add(name)
        try:
            data[name] = _data(read(), within)
        except Exception as error:  # noqa: BLE001  (see `readable`)
            data[name] = f"<cannot be read: {said(error)}>"
    return data


def _name(key: Any) -> str:
    data = _data(key, ())
    return (
        data if isinstance(data, str) else str(data) if isinstance(data, (int, float)) else _ADDRESS.sub("", repr(key))
    )


def _free(name: str, taken: Container[str]) -> str:
    numbered = (f"{name} ({number})" for number in itertools.count(2))
    return next(each for each in itertools.chain([name], numbered) if each not in taken)


def _elements(value: Any, within: tuple[int, ...]) -> Any:
    kind = type(value)
    if isinstance(value, torch.Tensor):
        # No collective, which reading another kind may be, and nothing of what has no data.
        is_plain = kind in {torch.Tensor, torch.nn.Parameter, torch.nn.Buffer} and not value.is_meta
        if is_plain and value.layout == torch.strided and value.numel() <= _MOST_ELEMENTS:
            return _data(value.tolist(), within)
    elif getattr(value, "size", _MOST_ELEMENTS) <= _MOST_ELEMENTS:
        array = as_array(value)
        if array.size <= _MOST_ELEMENTS:
            return _data(array.tolist(), within)
    dtype = getattr(value, "dtype", None)
    return f"{kind.__name__}(shape={tuple(value.shape)}" + (f", dtype={dtype})" if dtype is not None else ")")


def _items(value: Any) -> Iterable[Any] | None:
    if isinstance(value, (list, tuple, deque)):
        return value
    if isinstance(value, Sequence) and not isinstance(value, (bytes, bytearray, memoryview, range)):
        return value if len(value) <= _MOST_ITEMS else None
    return None


def _sorted(items: list[Any]) -> list[Any]:
    """In the same order in every process, which sets of texts are not."""
    try:
        return sorted(items)
    except TypeError:
        return sorted(items, key=json.dumps)


def _single(value: Any) -> Any:
    if isinstance(value, (bytes, bytearray, memoryview)):
        return _cut(bytes(value).decode(errors="backslashreplace"))
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, (torch.device, torch.layout, torch.memory_format)):
        return str(value)
    if isinstance(value, type) or inspect.isroutine(value):
        return f"{value.__module__}.{value.__qualname__}".removeprefix("builtins.")
    if isinstance(value, ModuleType):
        return value.__name__
    if isinstance(value, complex):
        return repr(value)
    if isinstance(value, (Number, os.PathLike, date, time, timedelta)):
        try:
            return _scalar(value if isinstance(value, Integral) else plain_value(value))
        except (OverflowError, ValueError):  # a fraction beyond all floats
            return _cut(repr(value))
    return _OPAQUE


def _cut(text: str) -> str:
    return text if len(text) <= _MOST_CHARACTERS else text[:_MOST_CHARACTERS] + _MORE


def _unreadable(value: Any, error: Exception) -> str:
    return f"<{type(value).__qualname__} that cannot be read: {said(error)}>"
