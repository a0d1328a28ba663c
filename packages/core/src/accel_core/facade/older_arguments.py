"""Older names of constructor arguments and of strategies, and arguments that nobody takes."""

from __future__ import annotations

import difflib
import inspect
import os
import warnings
from collections.abc import Mapping
from typing import Any

from accel_core.base.deprecation import Deprecation, level_of_the_user
from accel_core.base.suggestions import nearest
from accel_core.contract.strategy import Strategy
from accel_core.options.option_sources import LOADER_OPTIONS, OPTIONS, PREFIX, variable_of
from accel_core.plugins import list_offers

OLDER_ARGUMENTS = (
    Deprecation("kwarg_handler", "kwargs_handlers", removed_in="1.0"),
    Deprecation("step_with_optimizer", "step_scheduler_with_optimizer", removed_in="1.0"),
)
"""Arguments of the Accelerator that have an older spelling."""


def renamed(older: dict[str, object], given: Mapping[str, object]) -> dict[str, Any]:
    """The arguments in `older` with an older spelling, by name; taken out, with a warning.

    Raises `ValueError` for one that is in `given` too, with another value than its default.
    """
    found = {}
    for spelling in OLDER_ARGUMENTS:
        if spelling.old in older:
            spelling.warn()
            if given.get(spelling.new) not in (None, True):
                raise ValueError(
                    f"{spelling.old} and {spelling.new} were both given, and are one argument. Leave {spelling.old} out."
                )
            found[spelling.new] = older.pop(spelling.old)
    return found


def chosen_strategy(strategy: object, older: dict[str, object]) -> tuple[object, Mapping[str, Strategy]]:
    """The strategy asked for; and by key, active first, the objects of `<name>_plugin=` and `<name>_plugins=`.

    These, older names of `strategy=`, are taken out of `older`. Raises `TypeError` if an object is
    none, `ValueError` for two strategies and for other names.
    """
    configured: Mapping[str, Strategy] = {}
    by = f"strategy={strategy!r}"
    for old in [name for name in older if name.endswith(("_plugin", "_plugins"))]:
        given = older.pop(old)
        if given is None:
            continue
        if strategy is not None:
            raise ValueError(f"{old}={given!r} and {by} were both given, and one run has one strategy. Leave one out.")
        configured = _configured(old, old.removesuffix("s").removesuffix("_plugin"), given)
        strategy, by = next(iter(configured.values())), f"{old}={given!r}"
    return strategy, configured


def names_of(kind: type[Any]) -> set[str]:
    """Names of a strategy class: its entry point's, its own in small letters, its older ones."""
    return {kind.__name__.lower(), offered_name(kind), *kind.older_names} - {""}


def offered_name(kind: type) -> str:
    """The name under which the package of a strategy's class offers it; empty if it does not."""
    return next((offer.name for offer in list_offers("accel.strategies") if offer.makes(kind)), "")


def _configured(argument: str, name: str, given: object) -> Mapping[str, Strategy]:
    objects = given if isinstance(given, Mapping) else {"default": given}
    if not objects:
        raise ValueError(f"{argument}={given!r} holds no strategy. Put at least one object into it, or leave it out.")
    for key, each in objects.items():
        found, kind = f"{argument}={each!r}" if objects is not given else f"{argument}[{key!r}]={each!r}", type(each)
        if not isinstance(each, Strategy):
            raise TypeError(f"{found} is a {kind.__name__}, expected a strategy object, such as DDP(bucket_cap_mb=50).")
        if name not in (names := sorted(names_of(kind))):
            what = f"{found} was given, but a {kind.__name__} goes by other names: {', '.join(names)}."
            raise ValueError(f"{what} Write strategy={kind.__name__}(...).")
    return dict(objects)


def warn_of_unread(environ: Mapping[str, str] = os.environ) -> None:
    """Warns of variables that nothing reads, named as an option is but for a letter or two."""
    known = {variable_of(option).removeprefix(PREFIX) for option in (*OPTIONS, *LOADER_OPTIONS, "debug", "log_level")}
    for name in sorted(environ):
        own = name.removeprefix(PREFIX)
        if own == name or own in known or "__" in own:
            continue
        # The cutoff is one letter of a short name: USE_XPU, which is another's, is no misspelt USE_CPU.
        if close := difflib.get_close_matches(own.upper(), known, n=1, cutoff=0.86):
            what = f"{name} is set, and nothing reads it. Type {PREFIX}{close[0]} if that was meant."
            warnings.warn(what, stacklevel=level_of_the_user())


def refuse_unknown(constructor: type, older: Mapping[str, object]) -> None:
    """Raises `TypeError` for arguments that nothing takes."""
    for name in older:
        meant = nearest(name, [each for each in inspect.signature(constructor).parameters if each != "older_names"])
        hint = f" Did you mean {meant!r}?" if meant else ""
        raise TypeError(f"Accelerator() got an argument {name!r} that nothing installed takes.{hint}")


def refuse_keywords(call: str, given: Mapping[str, object]) -> None:
    """Raises `TypeError` for keyword arguments that a call does not have."""
    if given:
        raise TypeError(f"{call} got {', '.join(sorted(given))}, and has no such options: a plugin has its own.")
