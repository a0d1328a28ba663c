"""Options of a component, read from its constructor: their names, types and defaults; and values of them made from text.

One declaration per option: a parameter of a constructor. What Python, a file, the environment, the command line or a
questionnaire say is converted here, by the same rules, for a closed set of types: bool, int, float, str, `Literal`, `Enum`, paths,
`torch.dtype`, `timedelta`, None, unions of these, and lists and dicts of them. A parameter of any other type is for Python only.

Values come in two forms. *Text* is what the environment and the command line have. *Data* is what JSON and YAML have: None,
bool, int, float, text, lists, and dicts with texts as keys.
"""

from __future__ import annotations

import builtins
import inspect
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
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

import torch

TRUE = ("1", "true", "yes", "on", "y", "t")
FALSE = ("0", "false", "no", "off", "n", "f")
NONE = ("none", "null")
_UNITS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_USUAL = {
    **vars(typing),
    "os": os,
    "torch": torch,
    "Path": Path,
    "timedelta": timedelta,
    "Sequence": Sequence,
    "Mapping": Mapping,
}
_LISTS: Mapping[Any, Callable[[list[Any]], Any]] = {
    list: list,
    Sequence: list,
    tuple: tuple,
    set: set,
    frozenset: frozenset,
}


@dataclass(frozen=True)
class Field:
    """One option of a component.

    Args:
        name: that of the parameter.
        type: the annotation, evaluated; `typing.Any` if it could not be.
        default: the parameter's; `inspect.Parameter.empty` if it has none.
        python_only: why text cannot express it; empty if it can.
    """

    name: str
    type: Any
    default: Any
    python_only: str = ""


def fields_of(factory: Callable[..., Any]) -> dict[str, Field]:
    """The options of what `factory` makes, by name, in the order of its parameters; `*args` and `**kwargs` are none."""
    fields = {}
    for parameter in inspect.signature(factory).parameters.values():
        if parameter.kind in {parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD}:
            continue
        fields[parameter.name] = _field(factory, parameter)
    return fields


def from_text(kind: Any, text: str) -> Any:
    """The value of type `kind` that a text stands for.

    A list is written with commas, or as JSON; a dict as JSON, or as `key=value,key=value`. Where a type admits several
    readings, a number is a number before it is a truth value, and a text is what nothing else fits.

    Raises:
        ValueError: if it stands for none; the message is `expected(kind)`.
    """
    return _convert(kind, text, text=True)


def from_data(kind: Any, data: Any) -> Any:
    """The value of type `kind` that data from JSON or YAML stand for. A text stands for what `from_text` makes of it.

    Raises:
        ValueError: if they stand for none; the message is `expected(kind)`.
    """
    return _convert(kind, data, text=isinstance(data, str))


def to_data(value: Any) -> Any:
    """A value of the closed set of types as data, such that `from_data` gives it back.

    Raises:
        TypeError: for any other value.
    """
    if isinstance(value, Enum):
        return to_data(value.value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, Mapping):
        return {str(key): to_data(each) for key, each in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [to_data(each) for each in value]
    raise TypeError(
        f"{value!r} is a {type(value).__name__}, which neither text nor data can express: give it in Python."
    )


def expected(kind: Any) -> str:
    """What a value of type `kind` looks like, in words: "true or false", "a whole number", "one of 'pad', 'stop'"."""
    words = list(dict.fromkeys(_words(kind)))
    return " or ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else words[0]


def choices(kind: Any) -> tuple[Any, ...]:
    """The values to choose from, where the type lists all of them (None aside); else nothing."""
    members = [member for member in _members(kind) if member is not types.NoneType]
    if members == [bool]:
        return (True, False)
    found: list[Any] = []
    for member in members:
        if get_origin(member) is Literal:
            found += get_args(member)
        elif isinstance(member, type) and issubclass(member, Enum):
            found += list(member)
        else:
            return ()
    return tuple(found)


def is_optional(kind: Any) -> bool:
    """Whether None is a value of the type."""
    return types.NoneType in _members(kind)


def _field(factory: Callable[..., Any], parameter: inspect.Parameter) -> Field:
    kind = parameter.annotation
    if kind is parameter.empty:
        return Field(parameter.name, Any, parameter.default, "it has no type")
    written = kind if isinstance(kind, str) else _name(kind)
    if isinstance(kind, str):
        try:
            kind = eval(kind, {}, _Names(factory))  # noqa: S307  # an annotation of code that runs anyway
        except Exception:  # noqa: BLE001  # whatever an annotation says that only type checkers can read
            kind = Any
    if kind is Any or not _convertible(kind):
        return Field(parameter.name, Any, parameter.default, f"its type is {written}")
    return Field(parameter.name, kind, parameter.default)


class _Object:
    """Stands for a class that only type checkers see: one of objects."""


class _Names(dict[str, Any]):
    """The names that the annotations of a constructor may use: those of the module in which it is written.

    What that module imports for type checkers only is missing there: the usual ones are known, any other is one of objects.
    """

    def __init__(self, factory: Callable[..., Any]) -> None:
        function: Any = inspect.unwrap(factory.__init__ if isinstance(factory, type) else factory)  # type: ignore[misc]
        own = vars(sys.modules[factory.__module__]) if factory.__module__ in sys.modules else {}
        super().__init__({**_USUAL, **own, **getattr(function, "__globals__", {})})

    def __missing__(self, name: str) -> Any:
        if hasattr(builtins, name):
            return getattr(builtins, name)
        return _Object


def _members(kind: Any) -> list[Any]:
    """The types of a union, the type itself if it is none."""
    kind = types.NoneType if kind is None else kind
    if get_origin(kind) in {Union, types.UnionType}:
        return [member for each in get_args(kind) for member in _members(each)]
    if get_origin(kind) in {typing.Annotated, typing.Final}:
        return _members(get_args(kind)[0])
    return [kind]


def _convertible(kind: Any) -> bool:
    """Whether text can express a value of the type that is not None. Members of a union that it cannot are for Python only."""
    return any(_is_simple(member) or _is_container(member) for member in _members(kind) if member is not types.NoneType)


def _is_simple(kind: Any) -> bool:
    if get_origin(kind) is Literal:
        return True
    if kind is os.PathLike or get_origin(kind) is os.PathLike:
        return True
    return isinstance(kind, type) and (
        kind in {bool, int, float, str, torch.dtype, timedelta} or issubclass(kind, (Enum, Path))
    )


def _is_container(kind: Any) -> bool:
    origin = get_origin(kind) or kind
    if origin in {dict, Mapping}:
        keys, values = get_args(kind) or (str, Any)
        return keys is str and (values is Any or _convertible(values))
    return origin in _LISTS and all(each is Any or each is ... or _convertible(each) for each in get_args(kind))


_ORDER: tuple[Callable[[Any], bool], ...] = (
    lambda kind: get_origin(kind) is Literal,
    lambda kind: kind is types.NoneType,
    lambda kind: isinstance(kind, type) and issubclass(kind, Enum),
    lambda kind: kind is int,
    lambda kind: kind is float,
    lambda kind: kind is bool,
    lambda kind: kind in {torch.dtype, timedelta},
    _is_container,
    lambda _: True,
)
"""In which order the members of a union are tried: the narrow before the wide, and text last."""


def _convert(kind: Any, value: Any, *, text: bool) -> Any:
    if kind is Any:
        return _any(value, text=text)
    members = [
        member for member in _members(kind) if _is_simple(member) or _is_container(member) or member is types.NoneType
    ]
    for member in sorted(members, key=lambda each: next(place for place, fits in enumerate(_ORDER) if fits(each))):
        if str in members and _is_container(member) and isinstance(value, str) and not _looks_like_several(value):
            continue  # one name, where one or several may be given
        try:
            return _one(member, value, text=text)
        except (ValueError, TypeError):
            continue
    raise ValueError(expected(kind))


def _one(kind: Any, value: Any, *, text: bool) -> Any:
    """A value of one type that is no union. Raises `ValueError` or `TypeError` if it is of another."""
    if kind is types.NoneType:
        return _none(value)
    if get_origin(kind) is Literal:
        return _among(get_args(kind), value)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return _among(tuple(kind), value)
    if kind is bool:
        return _truth(value)
    if _is_container(kind):
        return _container(kind, value, text=text)
    if kind is torch.dtype:
        return _dtype(value)
    if kind is timedelta:
        return _duration(value)
    if kind in {int, float}:
        return _number(kind, value)
    if not isinstance(value, str):
        raise TypeError(value)
    return value if kind is str else Path(value)


def _none(value: Any) -> None:
    if value is not None and not (isinstance(value, str) and value.strip().lower() in NONE):
        raise ValueError(value)


def _truth(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    lowered = value.strip().lower() if isinstance(value, str) else ""
    if lowered not in (*TRUE, *FALSE):
        raise ValueError(value)
    return lowered in TRUE


def _number(kind: type, value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise TypeError(value)
    if kind is int and isinstance(value, float):
        raise ValueError(value)
    return kind(value)


def _among(values: Sequence[Any], value: Any) -> Any:
    for each in values:
        plain = each.value if isinstance(each, Enum) else each
        if type(plain) is type(value) and plain == value:
            return each
    if isinstance(value, str):
        for each in values:
            plain = each.value if isinstance(each, Enum) else each
            if str(to_data(plain)).casefold() == value.strip().casefold():
                return each
    raise ValueError(value)


def _dtype(value: Any) -> torch.dtype:
    found = getattr(torch, value.strip().removeprefix("torch."), None) if isinstance(value, str) else None
    if not isinstance(found, torch.dtype):
        raise ValueError(value)
    return found


def _duration(value: Any) -> timedelta:
    if isinstance(value, bool):
        raise TypeError(value)
    if isinstance(value, (int, float)):
        return timedelta(seconds=value)
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h|d)?", value.strip())
    if match is None:
        raise ValueError(value)
    return timedelta(seconds=float(match[1]) * _UNITS[match[2] or "s"])


def _container(kind: Any, value: Any, *, text: bool) -> Any:
    origin = get_origin(kind) or kind
    if origin in {dict, Mapping}:
        data = _dict_of(value) if isinstance(value, str) else value
        if not isinstance(data, Mapping):
            raise TypeError(value)
        each = (get_args(kind) or (str, Any))[1]
        return {str(key): _convert(each, item, text=isinstance(item, str)) for key, item in data.items()}
    data = _list_of(value) if isinstance(value, str) else value
    if not isinstance(data, (list, tuple)):
        raise TypeError(value)
    each = next(iter(get_args(kind)), Any)
    return _LISTS[origin]([_convert(each, item, text=text and isinstance(item, str)) for item in data])


def _looks_like_several(text: str) -> bool:
    return "," in text or text.lstrip().startswith(("[", "{"))


def _list_of(text: str) -> Any:
    stripped = text.strip()
    if stripped.startswith("["):
        return json.loads(stripped)
    return [part.strip() for part in stripped.split(",")] if stripped else []


def _dict_of(text: str) -> Any:
    stripped = text.strip()
    if stripped.startswith("{"):
        return json.loads(stripped)
    pairs = [part.partition("=") for part in stripped.split(",") if part.strip()]
    if any(not separator for _, separator, _ in pairs):
        raise ValueError(text)
    return {key.strip(): value.strip() for key, _, value in pairs}


def _any(value: Any, *, text: bool) -> Any:
    """Of a value that may be anything, text is read as JSON where it is JSON."""
    if not text:
        return value
    try:
        return json.loads(value)
    except ValueError:
        return value


def _words(kind: Any) -> list[str]:
    words: list[str] = []
    listed = choices(kind)
    if listed and set(map(type, listed)) != {bool}:
        words.append(f"one of {', '.join(repr(to_data(each)) for each in listed)}")
    for member in _members(kind):
        if member is not types.NoneType and not (words and (get_origin(member) is Literal or _is_enum(member))):
            words += _words_of(member)
    if is_optional(kind) and "one of 'none'" not in words:
        words.append("'none'")
    return words or ["an object"]


def _words_of(kind: Any) -> list[str]:
    plain = {
        bool: "true or false",
        int: "a whole number",
        float: "a number",
        str: "a text",
        torch.dtype: "a dtype of torch such as 'bfloat16'",
        timedelta: "a time such as 600 (seconds), '90s', '30m' or '2h'",
    }
    if kind in plain:
        return [plain[kind]]
    if get_origin(kind) is Literal:
        return [f"one of {', '.join(map(repr, get_args(kind)))}"]
    if _is_enum(kind):
        return [f"one of {', '.join(repr(to_data(each)) for each in kind)}"]
    if not _is_container(kind):
        return ["a path"] if _is_simple(kind) else []
    if (get_origin(kind) or kind) in {dict, Mapping}:
        return ["a mapping such as {key: value}"]
    each = next(iter(get_args(kind)), Any)
    return ["a list" if each is Any else f"a list, each {expected(each)}"]


def _is_enum(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Enum)


def _name(kind: Any) -> str:
    return kind.__name__ if isinstance(kind, type) else str(kind).replace("typing.", "")
