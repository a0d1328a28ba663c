"""Options of the Accelerator: an argument wins, even if it equals the default, then what was said outside of the code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from accel_core.base.suggestions import nearest
from accel_core.base.vocabulary import RNGType
from accel_core.options.option_sources import FALSE, TRUE, given_outside

T = TypeVar("T")
D = TypeVar("D")


@dataclass(frozen=True)
class Option(Generic[T]):
    """A value, and its source: "argument", an option of a launcher, the name of a variable, a file, or "default"."""

    value: T
    source: str


def resolve(argument: T | None, variable: str, parse: Callable[[str, str], T], default: D) -> Option[T | D]:
    """The argument unless it is None, else what `parse` makes of the text and source given outside, else the default."""
    if argument is not None:
        return Option(argument, "argument")
    found = given_outside(variable)
    if found is None:
        return Option(default, "default")
    return Option(parse(found.text, found.source), found.source)


def as_text(text: str, _: str) -> str:
    """The text itself."""
    return text


def as_bool(text: str, variable: str) -> bool:
    """true/false and their usual spellings."""
    if text.lower() not in (*TRUE, *FALSE):
        raise ValueError(f"{variable}={text!r} is not a truth value: expected one of {', '.join((*TRUE, *FALSE))}.")
    return text.lower() in TRUE


def as_steps(text: str, variable: str) -> int:
    """An integer of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"{variable}={text!r} is not a number of steps: expected an integer of at least 1, e.g. 4.")
    return int(text)


def as_seed(text: str, variable: str) -> int:
    """An integer from 0 to 2**64 - 1, which is what torch takes."""
    if not text.isdecimal() or int(text) >= 2**64:
        raise ValueError(f"{variable}={text!r} is not a seed: expected an integer from 0 to 2**64 - 1, e.g. 42.")
    return int(text)


def as_list(text: str, _: str) -> list[str]:
    """Names between commas; none in an empty text."""
    return [name.strip() for name in text.split(",")] if text else []


def flag(name: str, argument: object, variable: str, default: D) -> Option[bool | D]:
    """A resolved truth value. Raises `TypeError` for an argument that is none: a text such as "no" would count as true."""
    if argument is not None and not isinstance(argument, bool):
        raise TypeError(f"{name}={argument!r} is a {type(argument).__name__}: expected True or False.")
    return resolve(argument, variable, as_bool, default)


def as_sequence(name: str, value: object) -> Sequence[Any]:
    """A list or tuple as it is. Raises `TypeError` for anything else, such as one object instead of a list of one."""
    if not isinstance(value, (list, tuple)):
        raise TypeError(f"{name}={value!r} is a {type(value).__name__}: expected a list, e.g. {name}=[...].")
    return value


def as_rng_types(asked: str, value: object) -> tuple[str, ...]:
    """The names of random streams in a list of texts and `RNGType`s; `asked` names the argument or variable.

    Raises `TypeError` if it is no list, `ValueError` for what `RNGType` does not have.
    """
    known = [kind.value for kind in RNGType]
    for kind in as_sequence(asked, value):
        if kind not in known:
            meant = nearest(str(kind), known)
            hint = "" if meant is None else f" Type {meant!r} if that was meant."
            raise ValueError(f"{asked} holds {kind!r}, which names no random stream. Known: {', '.join(known)}.{hint}")
    return tuple(RNGType(kind).value for kind in value)  # type: ignore[attr-defined]
