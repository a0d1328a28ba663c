"""Options of the Accelerator and its loader: an argument wins, then what was said outside."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Generic, TypeVar

from accel_core.base.suggestions import choices, nearest
from accel_core.base.vocabulary import RNGType
from accel_core.options.handlers import KwargsHandler
from accel_core.options.option_sources import FALSE, LOADER_OPTIONS, TRUE, given_outside, variable_of

T = TypeVar("T")
D = TypeVar("D")

VARIABLES: Mapping[str, str] = {name: variable_of(name) for name in LOADER_OPTIONS}
"""The variable of every option of the loader component that the environment may set."""


@dataclass(frozen=True)
class Option(Generic[T]):
    """A value and its source: "argument", a launcher's option, a variable, a file, "default"."""

    value: T
    source: str


def resolve(argument: T | None, variable: str, parse: Callable[[str, str], T], default: D) -> Option[T | D]:
    """The argument unless None, else the text given outside, parsed, else the default."""
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
    """A resolved flag. Raises `TypeError` for no bool: a text such as "no" would be true."""
    if argument is not None and not isinstance(argument, bool):
        raise TypeError(f"{name}={argument!r} is a {type(argument).__name__}: expected True or False.")
    return resolve(argument, variable, as_bool, default)


def as_sequence(name: str, value: object) -> Sequence[Any]:
    """A list or tuple as it is. Raises `TypeError` for others: one object without a list."""
    if not isinstance(value, (list, tuple)):
        raise TypeError(f"{name}={value!r} is a {type(value).__name__}: expected a list, e.g. {name}=[...].")
    return value


def as_rng_types(asked: str, value: object) -> tuple[str, ...]:
    """The random streams in a list; `TypeError` for no list, `ValueError` for unknown names."""
    known = [kind.value for kind in RNGType]
    for kind in as_sequence(asked, value):
        if kind not in known:
            hint = choices(nearest(str(kind), known), known)
            raise ValueError(f"{asked} holds {kind!r}, which names no random stream. {hint}")
    return tuple(RNGType(kind).value for kind in value)  # type: ignore[attr-defined]


def refuse_beside(argument: str, built: object, option: str, value: object, variable: str, same: object = None) -> None:
    """Raises `ValueError` for an option beside an object with it; outside of code it may be the `same`."""
    outside = given_outside(variable)
    if value is not None or (outside is not None and outside.text != str(same)):
        other = f"{option}={value!r}" if value is not None or outside is None else f"{outside.source}={outside.text!r}"
        what = f"{other} and {argument}={built} were both given. An object that is built in code is complete:"
        raise ValueError(f"{what} give it the option, and leave the other out.")


def resolve_options(loose: Mapping[str, object], config: object) -> dict[str, Option[Any]]:
    """Options with sources, of arguments and `dataloader_config`; else "default" and None."""
    if config is None:
        return {name: _resolved(name, loose.get(name)) for name in VARIABLES}
    if not isinstance(config, KwargsHandler):
        what = f"dataloader_config={config!r} is a {type(config).__name__}:"
        raise TypeError(f"{what} expected an object of options, such as DataLoaderConfiguration(...) of accel-data.")
    names, given = [field.name for field in fields(config)], config.to_kwargs()
    for name in names:
        refuse_beside("dataloader_config", config, name, loose.get(name), VARIABLES.get(name, ""))
    options = {name: _resolved(name, loose.get(name)) for name in VARIABLES if name not in names}
    own = {name: Option(given.get(name), "dataloader_config" if name in given else "default") for name in names}
    return {**options, **own}


def in_force(options: Mapping[str, Option[Any]], loader: object, from_object: bool) -> dict[str, Option[Any]]:
    """Options as of `resolve_options`; those not given as the loader has them, else None."""
    own = "loader" if from_object else "default"
    unsaid = {name for name, option in options.items() if option.source == "default"}
    return {**options, **{name: Option(getattr(loader, name, None), own) for name in unsaid}}


def _resolved(name: str, argument: object) -> Option[Any]:
    variable = VARIABLES[name]
    if name == "data_seed":
        return resolve(argument, variable, as_seed, None)
    if name != "rng_types":
        return flag(name, argument, variable, None)
    option: Option[Any] = resolve(argument, variable, as_list, None)
    if option.value is None:
        return option
    asked = name if option.source == "argument" else option.source
    return Option(list(as_rng_types(asked, option.value)), option.source)
