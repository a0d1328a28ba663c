"""Older names of constructor arguments and of strategies, and arguments that nobody takes."""

from __future__ import annotations

import difflib
import inspect
import os
import warnings
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple, TypeVar

from accel_core.base.deprecation import Deprecation, level_of_the_user
from accel_core.contract.strategy import Strategy
from accel_core.options.option_sources import LOADER_OPTIONS, OPTIONS, PREFIX, variable_of
from accel_core.plugins import list_offers

T = TypeVar("T")

OLDER_ARGUMENTS: Mapping[str, Deprecation] = {
    "kwargs_handlers": Deprecation("kwarg_handler", "kwargs_handlers", removed_in="1.0"),
    "step_scheduler_with_optimizer": Deprecation(
        "step_with_optimizer", "step_scheduler_with_optimizer", removed_in="1.0"
    ),
}
"""Arguments of the Accelerator that have an older spelling."""


def renamed(older: dict[str, object], name: str, given: T, default: T) -> T:
    """The value of an argument that may stand in `older` under its older spelling, which is taken out with a warning.

    `given` is what it has under its name `name`, one of `OLDER_ARGUMENTS`. Raises `ValueError` if
    both spellings were given.
    """
    deprecation = OLDER_ARGUMENTS[name]
    spelling = deprecation.old
    if spelling not in older:
        return given
    deprecation.warn()
    value = older.pop(spelling)
    if given != default:
        raise ValueError(
            f"{spelling}={value!r} and {name}={given!r} were both given, and they are one argument in two spellings. Leave "
            f"{spelling} out."
        )
    return value  # type: ignore[return-value]  # checked by who receives it, like what was given under the new spelling


class ChosenStrategy(NamedTuple):
    """The strategy that the arguments ask for.

    Args:
        active: a name or an object; None: nothing was given.
        name: that of `<name>_plugin`, under which the objects were configured; else empty.
        configured: key → object, in the order that was given; the first is the active one.
    """

    active: object = None
    name: str = ""
    configured: Mapping[str, Strategy] = MappingProxyType({})


def chosen_strategy(strategy: object, older: dict[str, object]) -> ChosenStrategy:
    """`<name>_plugin=` and `<name>_plugins=` are `strategy=` under an older name: takes such arguments out of `older`.

    Raises `TypeError` if an object is no strategy, `ValueError` if two strategies were given, or an
    object goes by other names.
    """
    chosen, by = ChosenStrategy(strategy), f"strategy={strategy!r}"
    for argument in [name for name in older if name.endswith(("_plugin", "_plugins"))]:
        given = older.pop(argument)
        if given is None:
            continue
        if chosen.active is not None:
            raise ValueError(
                f"{argument}={given!r} and {by} were both given, and one run has one strategy. Leave one of them out; "
                f"several configured objects of one kind go into one dict."
            )
        name = argument.removesuffix("s").removesuffix("_plugin")
        configured = _configured(argument, name, given)
        chosen, by = ChosenStrategy(next(iter(configured.values())), name, configured), f"{argument}={given!r}"
    return chosen


def names_of(kind: type[Strategy]) -> set[str]:
    """The names of a class of strategies: its entry point's, its own in small letters, and the older ones that it declares."""
    return {kind.__name__.lower(), offered_name(kind), *kind.older_names} - {""}


def offered_name(kind: type) -> str:
    """The name under which the package of a strategy's class offers it; empty if it does not."""
    package = kind.__module__.partition(".")[0]
    for offer in list_offers():
        module, _, name = offer.value.partition(":")
        if (offer.group, name, module.partition(".")[0]) == ("accel.strategies", kind.__name__, package):
            return offer.name
    return ""


def _configured(argument: str, name: str, given: object) -> Mapping[str, Strategy]:
    objects = given if isinstance(given, Mapping) else {"default": given}
    if not objects:
        raise ValueError(f"{argument}={given!r} holds no strategy. Put at least one object into it, or leave it out.")
    for key, each in objects.items():
        found = f"{argument}={each!r}" if objects is not given else f"{argument}[{key!r}]={each!r}"
        if not isinstance(each, Strategy):
            raise TypeError(
                f"{found} is a {type(each).__name__}, expected a strategy object. Build it in code, e.g. "
                f"strategy=DDP(bucket_cap_mb=50), or choose one by name: strategy='ddp'."
            )
        names = sorted(names_of(type(each)))
        if name not in names:
            raise ValueError(
                f"{found} was given, but a {type(each).__name__} goes by other names: {', '.join(names)}. Write {names[0]}_plugin="
                f"{type(each).__name__}(...), or strategy={type(each).__name__}(...)."
            )
    return dict(objects)


def warn_of_unread(environ: Mapping[str, str] = os.environ) -> None:
    """Warns of variables of the environment that nothing reads, and whose names are those of options but for a letter or two.

    Others belong to launchers, this one's or somebody else's.
    """
    known = {variable_of(option).removeprefix(PREFIX) for option in (*OPTIONS, *LOADER_OPTIONS, "debug", "log_level")}
    for name in sorted(environ):
        own = name.removeprefix(PREFIX)
        if own == name or own in known or "__" in own:
            continue
        close = difflib.get_close_matches(own.upper(), known, n=1, cutoff=_CLOSE)
        if close:
            warnings.warn(
                f"{name} is set, and nothing reads it. Type {PREFIX}{close[0]} if that was meant.",
                stacklevel=level_of_the_user(),
            )


_CLOSE = 0.86  # one letter of a short name: USE_XPU, which is another's, is no misspelt USE_CPU


def refuse_unknown(constructor: type, older: Mapping[str, object]) -> None:
    """Raises for arguments that nothing takes."""
    if older:
        name = next(iter(older))
        known = [parameter for parameter in inspect.signature(constructor).parameters if parameter != "older_names"]
        close = difflib.get_close_matches(name, known, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else f" Known: {', '.join(known)}, and <name>_plugin."
        raise TypeError(f"Accelerator() got an argument {name!r} that nothing installed takes.{hint}")


def refuse_keywords(call: str, given: Mapping[str, object]) -> None:
    """Raises `TypeError` for keyword arguments that a call does not have."""
    if given:
        raise TypeError(
            f"{call} got {', '.join(sorted(given))}, and has no such options: what a format of checkpoints needs to know, its plugin takes "
            f"in its constructor. Leave them out."
        )
