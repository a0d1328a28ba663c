"""Options of a constructor, and their values from text and from data, for a closed set of types.

`_type` lists them; unions of these are admitted too, and lists, tuples, sets and dicts of them.
*Text* is what the environment and the command line have, *data* what JSON and YAML have.
"""

from __future__ import annotations

import builtins
import inspect
import itertools
import json
import os
import re
import sys
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin

import torch

from accel_core.options.resolution import as_bool

_USUAL = vars(typing) | {each.__name__: each for each in (os, torch, Path, timedelta, Sequence, Mapping)}
_UNITS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_LISTS: Mapping[Any, Any] = {Sequence: list, list: list, tuple: tuple, set: set, frozenset: frozenset}


def from_data(kind: Any, data: Any) -> Any:
    """The value of type `kind` that a text, or data from JSON or YAML, stand for.

    In text, a list has commas, or is JSON; a dict is JSON, or `key=value,key=value`. Where a type
    admits several readings, a number is a number before it is a truth value, and a text is what
    nothing else fits. Where it admits anything, text is read as JSON if it is JSON. `ValueError`
    if they stand for none; the message is `expected(kind)`.
    """
    return _parsed(data) if kind is Any and isinstance(data, str) else _convert(kind, data)


def to_data(value: Any) -> Any:
    """A value as data, which `from_data` reads; `TypeError` for a type not of the closed set."""
    for kinds, make in _DATA:
        if isinstance(value, kinds):
            return make(value)
    raise TypeError(f"{value!r} is a {type(value).__name__}, which no text or data can express: give it in Python")


_DATA: Sequence[tuple[Any, Callable[[Any], Any]]] = (
    (Enum, lambda value: to_data(value.value)),
    ((bool, int, float, str, types.NoneType), lambda value: value),
    (os.PathLike, os.fspath),
    (torch.dtype, lambda value: str(value).removeprefix("torch.")),
    (timedelta, timedelta.total_seconds),
    (Mapping, lambda value: {str(key): to_data(each) for key, each in value.items()}),
    ((list, tuple, set, frozenset), lambda value: [to_data(each) for each in value]),
)


def expected(kind: Any) -> str:
    """A description of a type: "true or false", "a whole number", "one of 'pad', 'stop'"."""
    known = [_type(member) for member in members(kind) if member is not types.NoneType]
    words = list(dict.fromkeys(each.words for each in known if each is not None))
    words += ["'none'"] if types.NoneType in members(kind) else []
    return " or ".join(filter(None, (", ".join(words[:-1]), words[-1]))) if words else "an object"


def choices(kind: Any) -> tuple[Any, ...]:
    """The values to choose from, where the type lists all of them (None aside); else nothing."""
    admitted = [member for member in members(kind) if member is not types.NoneType]
    if admitted == [bool]:
        return (True, False)
    listed = [_listed(member) for member in admitted]
    return tuple(itertools.chain(*listed)) if all(listed) else ()


def members(kind: Any) -> list[Any]:
    """The types in a union, None's and nested ones' too; of any other type, that type alone."""
    kind = types.NoneType if kind is None else kind
    if get_origin(kind) in {Union, types.UnionType}:
        return [member for each in get_args(kind) for member in members(each)]
    if get_origin(kind) in {typing.Annotated, typing.Final}:
        return members(get_args(kind)[0])
    return [kind]


def is_expressible(kind: Any) -> bool:
    """Whether text can express values other than None of the type, or of a member of a union."""
    return kind is Any or any(_type(member) for member in members(kind) if member is not types.NoneType)


class _Type(NamedTuple):
    """One type of the closed set. A union tries them by `order`: narrow before wide, text last."""

    order: int
    make: Callable[[Any], Any]
    words: str


def _type(kind: Any) -> _Type | None:
    origin, own = get_origin(kind) or kind, [each for each in get_args(kind) if each is not ...] or [Any]
    if listed := _listed(kind):
        return _Type(0, partial(_among, listed), f"one of {', '.join(repr(to_data(each)) for each in listed)}")
    if kind in _SIMPLE:
        return _SIMPLE[kind]
    if origin in {dict, Mapping}:
        fits = len(own) == 1 or (own[0] is str and all(map(is_expressible, own[1:])))
        return _Type(_MAPPING, partial(_mapping, own[-1]), "a mapping such as {key: value}") if fits else None
    if origin in _LISTS and all(map(is_expressible, own)):
        is_fixed = get_origin(kind) is tuple and ... not in get_args(kind)
        each = "" if own[0] is Any else f", each {expected(own[0])}"
        words = f"a list of {len(own)}: {', '.join(map(expected, own))}" if is_fixed else f"a list{each}"
        return _Type(_LIST, partial(_list, _LISTS[origin], own, is_fixed), words)
    is_path = origin is os.PathLike or (isinstance(kind, type) and issubclass(kind, Path))
    return _Type(_TEXT, partial(_text, Path), "a path") if is_path else None


def _convert(kind: Any, value: Any) -> Any:
    if kind is Any:
        return value
    one_name = str in members(kind) and isinstance(value, str) and "," not in value and not _is_json(value)
    kinds = sorted(filter(None, map(_type, members(kind))), key=lambda known: known.order)
    if isinstance(value, str) and "a path" in [known.words for known in kinds]:
        value = os.path.expanduser(value)  # no shell does so in a file, nor in --log-dir=~/logs
    for known in kinds:
        if one_name and known.order in {_MAPPING, _LIST}:
            continue  # of `str | Sequence[str]`
        try:
            return known.make(value)
        except (ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError):
            continue
    raise ValueError(expected(kind))


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _listed(kind: Any) -> tuple[Any, ...]:
    """The values of a `Literal`, or of an `Enum` of plain values."""
    if get_origin(kind) is Literal:
        return get_args(kind)
    is_enum = isinstance(kind, type) and issubclass(kind, Enum)
    return tuple(kind) if is_enum and all(isinstance(each.value, (bool, int, float, str)) for each in kind) else ()


def _among(listed: Sequence[Any], value: Any) -> Any:
    plain = [each.value if isinstance(each, Enum) else each for each in listed]
    alike = [type(own) is type(value) and own == value for own in plain]
    if True not in alike:
        alike = [str(own).casefold() == value.strip().casefold() for own in plain]
    return listed[alike.index(True)]


def _none(value: Any) -> None:
    if value is not None and value.strip().lower() not in {"none", "null"}:
        raise ValueError(value)


def _number(kind: Callable[[Any], Any], value: Any) -> Any:
    if isinstance(value, bool) or (kind is int and isinstance(value, float)):
        raise TypeError(value)
    return kind(value)


def _dtype(value: Any) -> torch.dtype:
    found = getattr(torch, value.strip().removeprefix("torch."))
    if not isinstance(found, torch.dtype):
        raise TypeError(value)
    return found


def _duration(value: Any) -> timedelta:
    if isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 0:
        return timedelta(seconds=value)
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h|d)?", value.strip())
    if match is None:
        raise ValueError(value)
    return timedelta(seconds=float(match[1]) * _UNITS[match[2] or "s"])


def _text(kind: Callable[[str], Any], value: Any) -> Any:
    if not isinstance(value, str):
        raise TypeError(value)
    return kind(value)


_MAPPING, _LIST, _TEXT = 7, 8, 9
_SIMPLE: Mapping[Any, _Type] = {
    types.NoneType: _Type(1, _none, "'none'"),
    int: _Type(2, partial(_number, int), "a whole number"),
    float: _Type(3, partial(_number, float), "a number"),
    bool: _Type(4, lambda value: value if isinstance(value, bool) else as_bool(value.strip(), ""), "true or false"),
    torch.dtype: _Type(5, _dtype, "a dtype of torch such as 'bfloat16'"),
    timedelta: _Type(6, _duration, "a time such as 600 (seconds), '90s', '30m' or '2h'"),
    str: _Type(_TEXT, partial(_text, str), "a text"),
}


def _is_json(text: str) -> bool:
    return text.lstrip().startswith(("[", "{"))


def _mapping(own: Any, value: Any) -> dict[str, Any]:
    """A dict of values of the type `own`. Refuses a key that stands there twice."""
    if isinstance(value, str) and _is_json(value):
        value = json.loads(value, object_pairs_hook=_unique)
    elif isinstance(value, str):
        pairs = [part.split("=", 1) for part in value.split(",") if part.strip()]
        value = _unique([(key.strip(), _part(own, item)) for key, item in pairs])
    return {str(key): _convert(own, item) for key, item in value.items()}


def _list(make: Callable[[list[Any]], Any], own: Sequence[Any], is_fixed: bool, value: Any) -> Any:
    has_commas = isinstance(value, str) and not _is_json(value)
    if isinstance(value, str):
        value = (value.split(",") if value.strip() else []) if has_commas else json.loads(value)
    if not isinstance(value, (list, tuple)):
        raise TypeError(value)
    pairs = zip(own if is_fixed else [own[0]] * len(value), value, strict=True)
    return make([_convert(kind, _part(kind, item) if has_commas else item) for kind, item in pairs])


def _part(kind: Any, text: str) -> Any:
    return _parsed(text.strip()) if kind is Any else text.strip()


def _unique(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError(pairs)
    return found


@dataclass(frozen=True)
class Field:
    """An option as a parameter, with its evaluated type, and why text cannot express it, if so."""

    name: str
    type: Any
    default: Any
    python_only: str = ""


def fields_of(factory: Callable[..., Any]) -> dict[str, Field]:
    """Options of a class, function or `functools.partial`, by name; no `*args`, `**kwargs`."""
    parameters = inspect.signature(factory).parameters.values()
    stars = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
    return {each.name: _field(factory, each) for each in parameters if each.kind not in stars}


def _field(factory: Callable[..., Any], parameter: inspect.Parameter) -> Field:
    kind = parameter.annotation
    for_python = partial(Field, parameter.name, Any, parameter.default)
    if kind is parameter.empty:
        return for_python("it has no type")
    written = kind.__name__ if isinstance(kind, type) else str(kind).replace("typing.", "")
    try:
        if isinstance(kind, str):
            kind = eval(kind, {}, _Names(factory))  # noqa: S307  # an annotation of code that runs anyway
        expressible = kind is not Any and is_expressible(kind)
    except Exception:  # noqa: BLE001  # whatever an annotation says that only type checkers can read, or nobody
        expressible = False
    return Field(parameter.name, kind, parameter.default) if expressible else for_python(f"its type is {written}")


class _Names(dict[str, Any]):
    """Names in annotations: of the module, usual imports for type checkers, else objects."""

    def __init__(self, factory: Callable[..., Any]) -> None:
        while isinstance(factory, partial):
            factory = factory.func
        function: Any = inspect.unwrap(factory.__init__ if isinstance(factory, type) else factory)  # type: ignore[misc]
        own = vars(sys.modules[factory.__module__]) if factory.__module__ in sys.modules else {}
        super().__init__({**_USUAL, **own, **getattr(function, "__globals__", {})})

    def __missing__(self, name: str) -> Any:
        return getattr(builtins, name, object)
