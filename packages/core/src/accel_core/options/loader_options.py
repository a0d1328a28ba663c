"""The options of the loader component: loose arguments, variables, or a `dataloader_config`. They reach it by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from accel_core.options.handlers import KwargsHandler
from accel_core.options.option_sources import LOADER_OPTIONS, given_outside, variable_of
from accel_core.options.resolution import Option, as_list, as_rng_types, as_seed, flag, resolve

VARIABLES: Mapping[str, str] = {name: variable_of(name) for name in LOADER_OPTIONS}
"""The variable of every option that the environment may set."""


def resolve_options(loose: Mapping[str, object], config: object) -> dict[str, Option[Any]]:
    """Every option with its source; "default" and None where nothing was given: the loader's own default holds.

    `loose` are arguments of the Accelerator. Raises `TypeError` for a value of another type,
    `ValueError` for a wrong one, or a field of `config` (`dataloader_config`) also given otherwise.
    """
    if config is None:
        return {name: _resolved(name, loose.get(name)) for name in VARIABLES}
    if not isinstance(config, KwargsHandler):
        raise TypeError(
            f"dataloader_config={config!r} is a {type(config).__name__}: expected an object of options, such as "
            f"DataLoaderConfiguration(...) of accel-data."
        )
    names, given = [field.name for field in fields(config)], config.to_kwargs()
    for name in names:
        _refuse_beside(config, name, loose.get(name))
    options = {name: _resolved(name, loose.get(name)) for name in VARIABLES if name not in names}
    own = {name: Option(given.get(name), "dataloader_config" if name in given else "default") for name in names}
    return {**options, **own}


def refuse_beside_object(config: object, loader: object) -> None:
    """Raises `ValueError` where a loader that was built in code is given a `dataloader_config` as well."""
    if config is not None and loader is not None and not isinstance(loader, str):
        raise ValueError(
            f"dataloader_config={config!r} and loader={type(loader).__name__}(...) were both given, and both configure it. "
            f"Give the object the options, or choose it by name."
        )


def in_force(options: Mapping[str, Option[Any]], loader: object, from_object: bool) -> dict[str, Option[Any]]:
    """What `resolve_options` returned, with what the loader itself (None: there is none) says where nothing was given."""
    own = "loader" if from_object else "default"
    return {
        name: Option(getattr(loader, name, None), own) if option.source == "default" else option
        for name, option in options.items()
    }


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


def _refuse_beside(config: KwargsHandler, name: str, argument: object) -> None:
    held = f"dataloader_config={type(config).__name__}({name}={getattr(config, name)!r})"
    outside = given_outside(VARIABLES.get(name, ""))
    if argument is not None:
        raise ValueError(
            f"{name}={argument!r} and {held} were both given, and the configuration is complete. Leave {name} out, or put "
            f"it into {type(config).__name__}(...) alone."
        )
    if outside is not None:
        raise ValueError(
            f"{outside.source}={outside.text!r} is set, and {held} was given, which is complete. Unset {outside.source}, or "
            f"leave dataloader_config out."
        )
