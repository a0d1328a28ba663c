"""Options of the Accelerator that were not given in code: read from the environment, once, in the constructor.

An argument that was given wins, even if it equals the default. `ACCELERATE_<OPTION>` stands for the argument `<option>`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")

_TRUE = ("1", "true", "yes", "on", "y", "t")
_FALSE = ("0", "false", "no", "off", "n", "f")


@dataclass(frozen=True)
class Option(Generic[T]):
    """A resolved option, and where its value came from: "argument", the name of a variable, or "default"."""

    value: T
    source: str


def resolve(argument: T | None, variable: str, parse: Callable[[str, str], T], default: T) -> Option[T]:
    """The value of one option: the argument if it was given, else the environment variable, else the default."""
    if argument is not None:
        return Option(argument, "argument")
    text = os.environ.get(variable)
    if text is None or not text.strip():
        return Option(default, "default")
    return Option(parse(text.strip(), variable), variable)


def as_text(text: str, _: str) -> str:
    """The text itself."""
    return text


def as_bool(text: str, variable: str) -> bool:
    """true/false and their usual spellings."""
    lowered = text.lower()
    if lowered in _TRUE:
        return True
    if lowered in _FALSE:
        return False
    raise ValueError(f"{variable}={text!r} is not a truth value: expected one of {', '.join((*_TRUE, *_FALSE))}.")


def as_steps(text: str, variable: str) -> int:
    """An integer of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"{variable}={text!r} is not a number of steps: expected an integer of at least 1, e.g. 4.")
    return int(text)
