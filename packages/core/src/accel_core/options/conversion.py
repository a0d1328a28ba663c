"""Values of options made from text and from data, and data made from values, for a closed set of types.

`_TYPES` lists them; unions of these are admitted too, and lists, tuples, sets and dicts of them.
What a file, the environment, the command line or a questionnaire say is converted here.

Values come in two forms. *Text* is what the environment and the command line have. *Data* is what
JSON and YAML have: None, bool, int, float, text, lists, and dicts with texts as keys.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from enum import Enum
from pathlib import Path
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin

import torch

from accel_core.options.option_sources import FALSE, TRUE

NONE = ("none", "null")
_UNITS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_LISTS: Mapping[Any, Callable[[list[Any]], Any]] = {
    list: list,
    Sequence: list,
    tuple: tuple,
    set: set,
    frozenset: frozenset,
}


def from_text(kind: Any, text: str) -> Any:
    """The value of type `kind` that a text stands for.

    A list is written with commas, or as JSON; a dict as JSON, or as `key=value,key=value`. Where a
    type admits several readings, a number is a number before it is a truth value, and a text is what
    nothing else fits. Where it admits anything, text is read as JSON if it is JSON.

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
    """A value of the closed set of types as data, such that `from_data` gives it back. Raises `TypeError` for any other."""
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
    """A description of the values of type `kind`: "true or false", "a whole number", "one of 'pad', 'stop'"."""
    rows = [(_row(member), member) for member in members(kind) if member is not types.NoneType]
    words = list(dict.fromkeys([row.words(member) for row, member in rows if row is not None]))
    if is_optional(kind):
        words.append("'none'")
    if not words:
        return "an object"
    return " or ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else words[0]


def choices(kind: Any) -> tuple[Any, ...]:
    """The values to choose from, where the type lists all of them (None aside); else nothing."""
    admitted = [member for member in members(kind) if member is not types.NoneType]
    if admitted == [bool]:
        return (True, False)
    listed = [_listed(member) for member in admitted]
    return tuple(itertools.chain(*listed)) if all(listed) else ()


def members(kind: Any) -> list[Any]:
    """The types that a union admits, None's among them, those of unions inside of it, too; the type itself if it is no union."""
    kind = types.NoneType if kind is None else kind
    if get_origin(kind) in {Union, types.UnionType}:
        return [member for each in get_args(kind) for member in members(each)]
    if get_origin(kind) in {typing.Annotated, typing.Final}:
        return members(get_args(kind)[0])
    return [kind]


def is_optional(kind: Any) -> bool:
    """Whether None is a value of the type."""
    return types.NoneType in members(kind)


def is_expressible(kind: Any) -> bool:
    """Whether text can express a value of the type that is not None. Members of a union that it cannot are for Python only."""
    return any(_row(member) for member in members(kind) if member is not types.NoneType)


def _convert(kind: Any, value: Any, *, text: bool) -> Any:
    if kind is Any:
        return _parsed(value) if text and isinstance(value, str) else value
    admitted = members(kind)
    one_name = str in admitted and isinstance(value, str) and "," not in value and not _is_json(value)
    for row in _TYPES:
        for member in admitted:
            if row.fits(member) and not (one_name and row.holds_others):
                try:
                    return row.make(member, value, text)
                except (ValueError, TypeError, OverflowError, RecursionError):
                    continue
    raise ValueError(expected(kind))


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _listed(kind: Any) -> tuple[Any, ...]:
    """The values of a `Literal` or an `Enum`."""
    if get_origin(kind) is Literal:
        return get_args(kind)
    return tuple(kind) if _is_enum(kind) else ()


def _is_enum(kind: Any) -> bool:
    return (
        isinstance(kind, type)
        and issubclass(kind, Enum)
        and all(isinstance(each.value, (bool, int, float, str)) for each in kind)
    )


def _among(kind: Any, value: Any, _: bool) -> Any:
    plain = [(each, each.value if isinstance(each, Enum) else each) for each in _listed(kind)]
    for each, own in plain:
        if type(own) is type(value) and own == value:
            return each
    if isinstance(value, str):
        for each, own in plain:
            if str(own).casefold() == value.strip().casefold():
                return each
    raise ValueError(value)


def _none(_: Any, value: Any, __: bool) -> None:
    if value is not None and not (isinstance(value, str) and value.strip().lower() in NONE):
        raise ValueError(value)


def _number(kind: Any, value: Any, _: bool) -> Any:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise TypeError(value)
    if kind is int and isinstance(value, float):
        raise ValueError(value)
    return kind(value)


def _truth(_: Any, value: Any, __: bool) -> bool:
    if isinstance(value, bool):
        return value
    lowered = value.strip().lower() if isinstance(value, str) else ""
    if lowered not in (*TRUE, *FALSE):
        raise ValueError(value)
    return lowered in TRUE


def _dtype(_: Any, value: Any, __: bool) -> torch.dtype:
    found = getattr(torch, value.strip().removeprefix("torch."), None) if isinstance(value, str) else None
    if not isinstance(found, torch.dtype):
        raise ValueError(value)
    return found


def _duration(_: Any, value: Any, __: bool) -> timedelta:
    if isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 0:
        return timedelta(seconds=value)
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h|d)?", value.strip()) if isinstance(value, str) else None
    if match is None:
        raise ValueError(value)
    return timedelta(seconds=float(match[1]) * _UNITS[match[2] or "s"])


def _text(kind: Any, value: Any, _: bool) -> Any:
    if not isinstance(value, str):
        raise TypeError(value)
    return value if kind is str else Path(value)


def _mapping(kind: Any, value: Any, text: bool) -> dict[str, Any]:
    data = value
    if isinstance(value, str) and _is_json(value):
        data, text = json.loads(value, object_pairs_hook=_unique), False
    elif isinstance(value, str):
        pairs = [part.partition("=") for part in value.split(",") if part.strip()]
        if any(not separator for _, separator, _ in pairs):
            raise ValueError(value)
        data = _unique([(key.strip(), item.strip()) for key, _, item in pairs])
    if not isinstance(data, Mapping):
        raise TypeError(value)
    own = _types_within(kind)[-1]
    return {str(key): _convert(own, item, text=text) for key, item in data.items()}


def _list(kind: Any, value: Any, text: bool) -> Any:
    data = value
    if isinstance(value, str) and _is_json(value):
        data, text = json.loads(value), False
    elif isinstance(value, str):
        data = [part.strip() for part in value.split(",")] if value.strip() else []
    if not isinstance(data, (list, tuple)):
        raise TypeError(value)
    own = _types_within(kind)
    items = zip(own, data, strict=True) if _is_fixed(kind) else ((own[0], item) for item in data)
    return _LISTS[get_origin(kind) or kind]([_convert(each, item, text=text) for each, item in items])


def _unique(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """A dict. Raises `ValueError` for a key that stands there twice, of which only one value could hold."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError(pairs)
    return found


def _is_json(text: str) -> bool:
    return text.lstrip().startswith(("[", "{"))


def _types_within(kind: Any) -> list[Any]:
    return [each for each in get_args(kind) if each is not ...] or [Any]


def _is_fixed(kind: Any) -> bool:
    """Whether a type is that of tuples with a type for each place."""
    return get_origin(kind) is tuple and ... not in get_args(kind)


def _is_mapping(kind: Any) -> bool:
    keys, *values = get_args(kind) or (str,)
    return (get_origin(kind) or kind) in {dict, Mapping} and keys is str and _are_expressible(values)


def _is_list(kind: Any) -> bool:
    return (get_origin(kind) or kind) in _LISTS and _are_expressible(_types_within(kind))


def _are_expressible(kinds: Sequence[Any]) -> bool:
    return all(each is Any or is_expressible(each) for each in kinds)


def _words_of_list(kind: Any) -> str:
    own = _types_within(kind)
    if _is_fixed(kind):
        return f"a list of {len(own)}: {', '.join(map(expected, own))}"
    return "a list" if own[0] is Any else f"a list, each {expected(own[0])}"


def _is_text(kind: Any) -> bool:
    return (get_origin(kind) or kind) in {str, os.PathLike} or (isinstance(kind, type) and issubclass(kind, Path))


class _Type(NamedTuple):
    """One row of the closed set of types.

    Args:
        fits: whether a type is of this row.
        make: the value for a type, a value in text or data, and whether text is text or data's.
        words: a description of the values.
        holds_others: whether the values consist of others.
    """

    fits: Callable[[Any], bool]
    make: Callable[[Any, Any, bool], Any]
    words: Callable[[Any], str]
    holds_others: bool = False


_TYPES = (
    _Type(
        lambda kind: bool(_listed(kind)),
        _among,
        lambda kind: f"one of {', '.join(repr(to_data(each)) for each in _listed(kind))}",
    ),
    _Type(lambda kind: kind is types.NoneType, _none, lambda _: "'none'"),
    _Type(lambda kind: kind is int, _number, lambda _: "a whole number"),
    _Type(lambda kind: kind is float, _number, lambda _: "a number"),
    _Type(lambda kind: kind is bool, _truth, lambda _: "true or false"),
    _Type(lambda kind: kind is torch.dtype, _dtype, lambda _: "a dtype of torch such as 'bfloat16'"),
    _Type(lambda kind: kind is timedelta, _duration, lambda _: "a time such as 600 (seconds), '90s', '30m' or '2h'"),
    _Type(_is_mapping, _mapping, lambda _: "a mapping such as {key: value}", holds_others=True),
    _Type(_is_list, _list, _words_of_list, holds_others=True),
    _Type(_is_text, _text, lambda kind: "a text" if kind is str else "a path"),
)
"""The types in the order in which the members of a union are tried: the narrow before the wide, and text last."""


def _row(kind: Any) -> _Type | None:
    return next((row for row in _TYPES if row.fits(kind)), None)
