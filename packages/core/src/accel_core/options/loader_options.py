"""The options of the loader component: loose arguments, variables of the environment, or a `dataloader_config`.

Which of them a loader has is for its constructor to say: what was given by name reaches it by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from accel_core.options.handlers import KwargsHandler
from accel_core.options.option_sources import LOADER_OPTIONS, given_outside, variable_of
from accel_core.options.resolution import Option, as_list, as_rng_types, as_seed, flag, resolve

VARIABLES: Mapping[str, str] = {name: variable_of(name) for name in LOADER_OPTIONS}
"""The variable of every option that the environment may set."""


def resolve_options(loose: Mapping[str, object], config: object) -> dict[str, Option[Any]]:
    """Every option with its source; "default" and None where nothing was given: the loader's own default holds.

    Args:
        loose: the arguments of the Accelerator, None where they were not given.
        config: its `dataloader_config`: None, or a `KwargsHandler` whose fields are options.

    Raises:
        TypeError: if a value is of the wrong type.
        ValueError: if a value is wrong, or a field of `config` was also given otherwise.
    """
    if config is None:
        return {name: _resolved(name, loose.get(name)) for name in VARIABLES}
    if not isinstance(config, KwargsHandler):
        raise TypeError(
            f"dataloader_config={config!r} is a {type(config).__name__}: expected an object of options, such as "
            f"DataLoaderConfiguration(...) of accel-data."
        )
    names = [field.name for field in fields(config)]
    for name in names:
        _refuse_beside(config, name, loose.get(name))
    given = config.to_kwargs()
    options = {name: _resolved(name, loose.get(name)) for name in VARIABLES if name not in names}
    for name in names:
        options[name] = Option(given[name], "dataloader_config") if name in given else Option(None, "default")
    return options


def refuse_beside_object(config: object, loader: object) -> None:
    """Raises `ValueError` where a loader that was built in code is given a `dataloader_config` as well."""
    if config is not None and loader is not None and not isinstance(loader, str):
        raise ValueError(
            f"dataloader_config={config!r} and loader={type(loader).__name__}(...) were both given, and both configure it. An "
            f"object built in code is complete: give it the options, or choose it by name."
        )


def check_class(config: object, loader: object) -> None:
    """Raises `TypeError` where a loader declares the class of its options as `handler`, and `config` is of another."""
    expected = getattr(loader, "handler", None)
    if config is not None and expected is not None and not isinstance(config, expected):
        raise TypeError(
            f"dataloader_config={config!r} is a {type(config).__name__}, and the loader {type(loader).__name__} takes "
            f"its options as {expected.__name__}. Pass {expected.__name__}(...)."
        )


def in_force(options: Mapping[str, Option[Any]], loader: object, from_object: bool) -> dict[str, Option[Any]]:
    """The options with what the loader itself says where nothing was given; None where it has no such option.

    Args:
        options: what `resolve_options` has returned.
        loader: the component, or None.
        from_object: whether it was passed as an object, which is then the source.
    """
    own = "loader" if from_object else "default"
    return {
        name: Option(getattr(loader, name, None), own) if option.source == "default" else option
        for name, option in options.items()
    }


def _resolved(name: str, argument: object) -> Option[Any]:
    variable = VARIABLES[name]
    parse = _PARSERS.get(name)
    if parse is None:
        return flag(name, argument, variable, None)
    option: Option[Any] = resolve(argument, variable, parse, None)
    if name != "rng_types" or option.value is None:
        return option
    asked = name if option.source == "argument" else option.source
    return Option(list(as_rng_types(asked, option.value)), option.source)


def _refuse_beside(config: KwargsHandler, name: str, argument: object) -> None:
    held = f"dataloader_config={type(config).__name__}({name}={getattr(config, name)!r})"
    if argument is not None:
        raise ValueError(
            f"{name}={argument!r} and {held} were both given, and the configuration is complete. Leave {name} out, or put "
            f"it into {type(config).__name__}(...) alone."
        )
    outside = given_outside(VARIABLES.get(name, ""))
    if outside is not None:
        raise ValueError(
            f"{outside.source}={outside.text!r} is set, and {held} was given: an object built in code is complete, so it would be "
            f"ignored. Unset {outside.source}, or leave dataloader_config out."
        )


_PARSERS: Mapping[str, Callable[[str, str], Any]] = {"data_seed": as_seed, "rng_types": as_list}
