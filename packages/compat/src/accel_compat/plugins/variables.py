"""Fields of data classes that a variable of the environment fills in where nothing was given."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import field, fields
from typing import Any

_TRUE = ("1", "on", "t", "true", "y", "yes")
_FALSE = ("0", "f", "false", "n", "no", "off")


def str_to_bool(value: str, to_bool: bool = False) -> int | bool:
    """1 or 0 for a word such as "yes" or "off", in either case; `to_bool=True`: True or False."""
    word = value.lower()
    if word not in _TRUE + _FALSE:
        raise ValueError(f"{value!r} is no truth value: expected one of {', '.join(_TRUE + _FALSE)}.")
    return word in _TRUE if to_bool else int(word in _TRUE)


def flag(value: str) -> bool:
    """A truth value that was written out."""
    return bool(str_to_bool(value))


def variable(name: str, convert: Callable[[str], Any] = str, otherwise: Any = None) -> Any:
    """A field whose default None stands for what the variable says, and without it for `otherwise`."""
    return field(default=None, metadata={"variable": name, "convert": convert, "otherwise": otherwise})


def fill(plugin: Any) -> None:
    """Sets the fields of `variable` that are None."""
    given = fields_from(type(plugin), os.environ)
    for each in fields(plugin):
        if "variable" in each.metadata and getattr(plugin, each.name) is None:
            setattr(plugin, each.name, given.get(each.name, each.metadata["otherwise"]))


def fields_from(kind: type[Any], environ: Mapping[str, str]) -> dict[str, Any]:
    """The fields that a variable is set for, with its value."""
    declared = {each.name: each.metadata for each in fields(kind) if "variable" in each.metadata}
    return {
        name: each["convert"](environ[each["variable"]])
        for name, each in declared.items()
        if each["variable"] in environ
    }
