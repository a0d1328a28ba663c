"""Options of a component, read from its constructor: a parameter is an option's one declaration."""

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

_OURS = {"os": os, "torch": torch, "Path": Path, "timedelta": timedelta, "Sequence": Sequence, "Mapping": Mapping}
_USUAL = {**vars(typing), **_OURS}


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
    """The options of what a class, function or `functools.partial` makes, by name, in the order of its parameters.

    `*args` and `**kwargs` are none.
    """
    named = inspect.signature(factory).parameters.values()
    parameters = [each for each in named if each.kind not in {each.VAR_POSITIONAL, each.VAR_KEYWORD}]
    alike = Counter(each.name.upper() for each in parameters)
    fields = {each.name: _field(factory, each) for each in parameters}
    why = "another one has its name in other letter case, and variables have one"
    return {
        name: replace(field, python_only=why) if alike[name.upper()] > 1 else field for name, field in fields.items()
    }


def _field(factory: Callable[..., Any], parameter: inspect.Parameter) -> Field:
    kind = parameter.annotation
    for_python = functools.partial(Field, parameter.name, Any, parameter.default)
    if parameter.kind is parameter.POSITIONAL_ONLY:
        return for_python("it is given by its place, and not by its name")
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


class _Object:
    """Stands for a class that only type checkers see: one of objects."""


class _Names(dict[str, Any]):
    """The names that annotations may use: those of their module, the usual ones that are imported for type checkers only."""

    def __init__(self, factory: Callable[..., Any]) -> None:
        while isinstance(factory, functools.partial):
            factory = factory.func
        function: Any = inspect.unwrap(factory.__init__ if isinstance(factory, type) else factory)  # type: ignore[misc]
        own = vars(sys.modules[factory.__module__]) if factory.__module__ in sys.modules else {}
        super().__init__({**_USUAL, **own, **getattr(function, "__globals__", {})})

    def __missing__(self, name: str) -> Any:
        return getattr(builtins, name, _Object)
