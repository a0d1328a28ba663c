"""Configurations as data of JSON, which people read where runs are recorded."""

from __future__ import annotations

import dataclasses
import inspect
import re
from argparse import Namespace
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from enum import Enum
from numbers import Integral
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from accel_trackers.recording.scalars import clean, fits, plain_value, said, written

DEEPEST = 50
"""How many containers may stand in each other; what lies deeper is "…"."""

_MOST_ELEMENTS = 64  # of a tensor or an array that is written out
_MOST_CHARACTERS = 2000  # of the text for an object
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_PLAIN = (bool, int, float, str)


def readable_config(config: object) -> dict[str, Any]:
    """A configuration as JSON has it: None, booleans, numbers (also nan and inf), texts, lists, and dicts with texts as keys.

    Mappings, dataclasses, named tuples, namespaces and models of pydantic become dicts, as any
    other object with attributes does if it is the whole of the configuration. Lists, tuples and
    sets become lists; members of an `Enum` their value, or their name; small tensors and arrays
    lists; paths, dates and whatever else a text. Integers that do not fit into 64 bits, which no
    service holds, become texts. Data that contain themselves are cut by "…".

    Never raises: what cannot be read is a text that says so, for no run is lost over its
    description.
    """
    if config is None:
        return {}
    found = _data(config, ())
    if isinstance(found, str) and not issubclass(type(config), (str, type, Enum, Mapping)):
        shown = _data(_Attributes(config), ())
        found = shown if isinstance(shown, dict) and shown else found
    return found if isinstance(found, dict) else {"config": found}


class _Attributes(NamedTuple):
    """An object of which the attributes count."""

    of: object


def _data(value: Any, above: tuple[int, ...]) -> Any:
    """The data of a value; `above`: the ids of the containers around it."""
    try:
        return _known(value, above)
    except Exception as error:  # noqa: BLE001  (whatever the user's objects raise)
        return f"<{type(value).__qualname__} that cannot be read: {said(error)}>"


def _known(value: Any, above: tuple[int, ...]) -> Any:
    if isinstance(value, _Attributes):
        return _dict(
            [(key, each) for key, each in vars(value.of).items() if not str(key).startswith("_")], (id(value.of),)
        )
    if isinstance(value, Enum):
        value = value.value if isinstance(value.value, (*_PLAIN, type(None))) else value.name
    if isinstance(value, Integral) and not fits(int(value)):
        return written(int(value))
    if isinstance(value, type) or inspect.isroutine(value):
        return f"{value.__module__}.{value.__qualname__}".removeprefix("builtins.")
    if hasattr(value, "shape") and hasattr(value, "tolist"):
        if id(value) in above or len(above) >= DEEPEST:
            return "…"
        return _data(value.tolist(), (*above, id(value))) if _is_small(value) else _shape(value)
    found = plain_value(value)
    if found is None or isinstance(found, _PLAIN):
        return found
    if id(value) in above or len(above) >= DEEPEST:
        return "…"
    within = (*above, id(value))
    if (fields := _fields(value)) is not None:
        return _dict(fields, within)
    if isinstance(value, (list, tuple, deque)):
        return [_data(each, within) for each in value]
    if isinstance(value, (set, frozenset)):  # in the same order in every process
        return sorted((_data(each, within) for each in value), key=str)
    return clean(_ADDRESS.sub("", str(value))[:_MOST_CHARACTERS])


def _fields(value: Any) -> Iterable[tuple[Any, Any]] | None:
    """Names and values of what has fields."""
    if isinstance(value, Mapping):
        return value.items()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(each.name, getattr(value, each.name, "<not set>")) for each in dataclasses.fields(value)]
    if hasattr(type(value), "__attrs_attrs__"):
        return [(each.name, getattr(value, each.name, "<not set>")) for each in type(value).__attrs_attrs__]
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return list(value._asdict().items())
    if isinstance(value, (Namespace, SimpleNamespace)):
        return list(vars(value).items())
    if not isinstance(value, type) and callable(getattr(value, "model_dump", None)):
        return list(value.model_dump(warnings=False).items())
    return None


def _dict(fields: Iterable[tuple[Any, Any]], within: tuple[int, ...]) -> dict[str, Any]:
    data: dict[str, Any] = {}
    alike: Counter[str] = Counter()
    for key, value in fields:
        name = whole = clean(key) if isinstance(key, str) else str(_data(key, ()))
        while whole in data:  # of another key: nothing gets lost
            alike[name] += 1
            whole = f"{name} ({alike[name] + 1})"
        data[whole] = _data(value, within)
    return data


def _is_small(value: Any) -> bool:
    """Whether the elements of a tensor or an array are here, and few. No collective, which reading another kind may be."""
    if isinstance(value, torch.Tensor):
        is_here = (
            type(value) in {torch.Tensor, torch.nn.Parameter} and not value.is_meta and value.layout == torch.strided
        )
        return is_here and value.numel() <= _MOST_ELEMENTS
    return bool(value.size <= _MOST_ELEMENTS)


def _shape(value: Any) -> str:
    return f"{type(value).__name__}(shape={tuple(value.shape)}, dtype={value.dtype})"
