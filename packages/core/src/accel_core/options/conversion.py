"""Values of options made from text and from data, and data made from values, for a closed set of types.

These are bool, int, float, str, `Literal`, `Enum`, paths, `torch.dtype`, `timedelta`, None, unions
of these, and lists, tuples, sets and dicts of them. What a file, the environment, the command line
or a questionnaire say is converted here, by the same rules.

Values come in two forms. *Text* is what the environment and the command line have. *Data* is what
JSON and YAML have: None, bool, int, float, text, lists, and dicts with texts as keys.
"""

from __future__ import annotations

import json
import os
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from enum import Enum
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

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
    type admits several readings, a number is a number before it is a truth value, and a text is
    what nothing else fits. Where it admits anything, what stands between commas is read as JSON if
    it is JSON; what JSON puts into quotes is a text.

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
    """A description of the values of type `kind`: "true or false", "a whole number", "one of 'pad', 'stop'"."""
    words = list(dict.fromkeys(_words(kind)))
    return " or ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else words[0]


def choices(kind: Any) -> tuple[Any, ...]:
    """The values to choose from, where the type lists all of them (None aside); else nothing."""
    admitted = [member for member in members(kind) if member is not types.NoneType]
    if admitted == [bool]:
        return (True, False)
    found: list[Any] = []
    for member in admitted:
        if get_origin(member) is Literal:
            found += get_args(member)
        elif _is_enum(member) and _is_simple(member):
            found += list(member)
        else:
            return ()
    return tuple(found)


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
    return any(_is_simple(member) or _is_container(member) for member in members(kind) if member is not types.NoneType)


def _is_simple(kind: Any) -> bool:
    if get_origin(kind) is Literal:
        return True
    if kind is os.PathLike or get_origin(kind) is os.PathLike:
        return True
    if _is_enum(kind):
        return all(isinstance(each.value, (bool, int, float, str)) for each in kind)
    return isinstance(kind, type) and (
        kind in {bool, int, float, str, torch.dtype, timedelta} or issubclass(kind, Path)
    )


def _is_container(kind: Any) -> bool:
    origin = get_origin(kind) or kind
    if origin in {dict, Mapping}:
        keys, values = get_args(kind) or (str, Any)
        return keys is str and (values is Any or is_expressible(values))
    return origin in _LISTS and all(each is Any or each is ... or is_expressible(each) for each in get_args(kind))


def _is_enum(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Enum)


_ORDER: tuple[Callable[[Any], bool], ...] = (
    lambda kind: get_origin(kind) is Literal,
    lambda kind: kind is types.NoneType,
    _is_enum,
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
    admitted = [
        member for member in members(kind) if _is_simple(member) or _is_container(member) or member is types.NoneType
    ]
    for member in sorted(admitted, key=lambda each: next(place for place, fits in enumerate(_ORDER) if fits(each))):
        if str in admitted and _is_container(member) and isinstance(value, str) and not _looks_like_several(value):
            continue  # one name, where one or several may be given
        try:
            return _one(member, value, text=text)
        except (ValueError, TypeError, OverflowError, RecursionError):
            continue
    raise ValueError(expected(kind))


def _one(kind: Any, value: Any, *, text: bool) -> Any:
    """A value of one type that is no union. Raises `ValueError` or `TypeError` if it is of another."""
    if kind is types.NoneType:
        return _none(value)
    if get_origin(kind) is Literal:
        return _among(get_args(kind), value)
    if _is_enum(kind):
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
    if isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 0:
        return timedelta(seconds=value)
    if not isinstance(value, str):
        raise ValueError(value)
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h|d)?", value.strip())
    if match is None:
        raise ValueError(value)
    return timedelta(seconds=float(match[1]) * _UNITS[match[2] or "s"])


def _container(kind: Any, value: Any, *, text: bool) -> Any:
    origin = get_origin(kind) or kind
    # What JSON puts into quotes is a text; what stands between commas may be anything.
    text = text and isinstance(value, str) and not _is_json(value)
    if origin in {dict, Mapping}:
        data = _dict_of(value) if isinstance(value, str) else value
        if not isinstance(data, Mapping):
            raise TypeError(value)
        each = (get_args(kind) or (str, Any))[1]
        return {str(key): _convert(each, item, text=text) for key, item in data.items()}
    data = _list_of(value) if isinstance(value, str) else value
    if not isinstance(data, (list, tuple)):
        raise TypeError(value)
    items = zip(_types_of_items(kind, len(data)), data, strict=True)
    return _LISTS[origin]([_convert(each, item, text=text) for each, item in items])


def _types_of_items(kind: Any, count: int) -> list[Any]:
    """The type of each of so many items. Raises `ValueError` where a tuple has another number of them."""
    own = get_args(kind) or (Any,)
    if _is_fixed(kind):
        if len(own) != count:
            raise ValueError(count)
        return list(own)
    return [own[0]] * count


def _is_fixed(kind: Any) -> bool:
    """Whether a type is that of tuples with a type for each place."""
    return get_origin(kind) is tuple and ... not in get_args(kind)


def _is_json(text: str) -> bool:
    return text.lstrip().startswith(("[", "{"))


def _looks_like_several(text: str) -> bool:
    return "," in text or _is_json(text)


def _list_of(text: str) -> Any:
    if _is_json(text):
        return json.loads(text)
    stripped = text.strip()
    return [part.strip() for part in stripped.split(",")] if stripped else []


def _dict_of(text: str) -> Any:
    if _is_json(text):
        return json.loads(text, object_pairs_hook=_unique)
    pairs = [part.partition("=") for part in text.split(",") if part.strip()]
    if any(not separator for _, separator, _ in pairs):
        raise ValueError(text)
    return _unique([(key.strip(), value.strip()) for key, _, value in pairs])


def _unique(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """A dict. Raises `ValueError` for a key that stands there twice, of which only one value could hold."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError(pairs)
    return found


def _any(value: Any, *, text: bool) -> Any:
    """Of a value that may be anything, text is read as JSON where it is JSON."""
    if not text or not isinstance(value, str):
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
    for member in members(kind):
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
    if _is_enum(kind) and _is_simple(kind):
        return [f"one of {', '.join(repr(to_data(each)) for each in kind)}"]
    if not _is_container(kind):
        return ["a path"] if _is_simple(kind) else []
    if (get_origin(kind) or kind) in {dict, Mapping}:
        return ["a mapping such as {key: value}"]
    if _is_fixed(kind):
        return [f"a list of {len(get_args(kind))}: {', '.join(map(expected, get_args(kind)))}"]
    each = next(iter(get_args(kind)), Any)
    return ["a list" if each is Any else f"a list, each {expected(each)}"]
