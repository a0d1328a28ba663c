"""Options of a component, read from its constructor: their names, types and defaults.

A parameter is an option's one declaration; one of a type outside of the closed set of
`accel_core.options.conversion` is for Python only.
"""

from __future__ import annotations

import builtins
import functools
import inspect
import os
import sys
import typing
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from accel_core.options.conversion import is_expressible

_USUAL = {
    **vars(typing),
    "os": os,
    "torch": torch,
    "Path": Path,
    "timedelta": timedelta,
    "Sequence": Sequence,
    "Mapping": Mapping,
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
    """The options of what `factory` makes, by name, in the order of its parameters; `*args` and `**kwargs` are none.

    Args:
        factory: a class, a function, or a `functools.partial` of one.
    """
    parameters = [
        each
        for each in inspect.signature(factory).parameters.values()
        if each.kind not in {each.VAR_POSITIONAL, each.VAR_KEYWORD}
    ]
    alike = Counter(each.name.upper() for each in parameters)
    fields = {}
    for parameter in parameters:
        field = _field(factory, parameter)
        if alike[field.name.upper()] > 1:
            field = replace(field, python_only="another one has its name in other letter case, and variables have one")
        fields[field.name] = field
    return fields


def _field(factory: Callable[..., Any], parameter: inspect.Parameter) -> Field:
    kind = parameter.annotation
    if parameter.kind is parameter.POSITIONAL_ONLY:
        return Field(parameter.name, Any, parameter.default, "it is given by its place, and not by its name")
    if kind is parameter.empty:
        return Field(parameter.name, Any, parameter.default, "it has no type")
    written = kind if isinstance(kind, str) else _name(kind)
    try:
        if isinstance(kind, str):
            kind = eval(kind, {}, _Names(factory))  # noqa: S307  # an annotation of code that runs anyway
        expressible = kind is not Any and is_expressible(kind)
    except Exception:  # noqa: BLE001  # whatever an annotation says that only type checkers can read, or nobody
        expressible = False
    if not expressible:
        return Field(parameter.name, Any, parameter.default, f"its type is {written}")
    return Field(parameter.name, kind, parameter.default)


class _Object:
    """Stands for a class that only type checkers see: one of objects."""


class _Names(dict[str, Any]):
    """The names that the annotations of a constructor may use: those of the module in which it is written.

    What that module imports for type checkers only is missing there: the usual ones are known, any
    other is one of objects.
    """

    def __init__(self, factory: Callable[..., Any]) -> None:
        while isinstance(factory, functools.partial):
            factory = factory.func
        function: Any = inspect.unwrap(factory.__init__ if isinstance(factory, type) else factory)  # type: ignore[misc]
        own = vars(sys.modules[factory.__module__]) if factory.__module__ in sys.modules else {}
        super().__init__({**_USUAL, **own, **getattr(function, "__globals__", {})})

    def __missing__(self, name: str) -> Any:
        if hasattr(builtins, name):
            return getattr(builtins, name)
        return _Object


def _name(kind: Any) -> str:
    return kind.__name__ if isinstance(kind, type) else str(kind).replace("typing.", "")
