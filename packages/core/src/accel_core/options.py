"""Older names of constructor arguments, and arguments that nobody takes."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping
from typing import NoReturn

from accel_core.plugins import find
from accel_core.strategies.strategy import Strategy


def strategy_from_plugin_argument(strategy: object, older: dict[str, object]) -> object:
    """`<name>_plugin=object` is `strategy=object` under an older name: takes such an argument out of `older`.

    Raises:
        TypeError: if the object is not a strategy.
        ValueError: if two strategies were given.
    """
    for argument in [name for name in older if name.endswith(("_plugin", "_plugins"))]:
        given = older.pop(argument)
        if given is None:
            continue
        if not isinstance(given, Strategy):
            raise TypeError(
                f"{argument}={given!r} is a {type(given).__name__}, expected a strategy object. Build it in code, e.g. "
                f"strategy=DDP(bucket_cap_mb=50), or choose one by name: strategy='ddp'."
            )
        if strategy is not None:
            raise ValueError(
                f"{argument}={given!r} and strategy={strategy!r} were both given, and one run has one strategy. Leave one "
                f"of them out."
            )
        strategy = given
    return strategy


def refuse_unknown(constructor: type, older: Mapping[str, object], log_with: object) -> None:
    """Raises for trackers that are not installed, and for arguments that nothing takes."""
    if log_with is not None:
        _refuse_trackers(log_with)
    if older:
        name = next(iter(older))
        known = [parameter for parameter in inspect.signature(constructor).parameters if parameter != "older_names"]
        close = difflib.get_close_matches(name, known, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else f" Known: {', '.join(known)}, and <name>_plugin."
        raise TypeError(f"Accelerator() got an argument {name!r} that nothing installed takes.{hint}")


def _refuse_trackers(log_with: object) -> NoReturn:
    names = log_with if isinstance(log_with, (list, tuple)) else [log_with]
    for name in names:
        if isinstance(name, str) and name != "all":
            find("accel.trackers", name)
    raise TypeError(
        f"log_with={log_with!r} was given, but this version of accel-core runs no trackers yet. Leave log_with out, and log "
        f"from `if accelerator.is_main_process:`."
    )
