"""The resolved options, as rows of a table or as JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from accel_core.api.launcher import DEFAULT_STRATEGIES, masked, to_data
from accel_launch.output import say, table
from accel_launch.settings.files import own_path
from accel_launch.settings.help_page import shown_value

if TYPE_CHECKING:
    from pathlib import Path

    from accel_launch.settings.resolution import Resolved, Value

NO_EFFECT = "(no effect: not chosen)"


def show(resolved: Resolved, *, defaults: bool = False) -> None:
    """Prints what was given and where it comes from; with `defaults`, all other options too, else their number."""
    shown = rows(resolved, defaults=defaults)
    if shown:
        table(("option", "value", "source"), shown)
    if left_out := len(rows(resolved)) - len(shown):
        more = "more " if shown else ""
        say(f"{left_out} {more}options have their defaults. `accel config show --all` lists them, too.")


def rows(resolved: Resolved, *, defaults: bool = True) -> list[tuple[str, str, str]]:
    """Option, value and source; last, the values given for unchosen components.

    Without `defaults` only of what was given.
    """
    shown = [each for each in resolved.values if defaults or (each.section, each.option) in resolved.given]
    return [
        *((value.key, _text(value), value.source) for value in shown),
        *((value.key, _text(value), f"{value.source} {NO_EFFECT}") for value in resolved.idle),
    ]


def as_data(resolved: Resolved) -> list[dict[str, Any]]:
    """Option, value and source of everything, as JSON, each with whether it has an effect."""
    pairs = [*((value, True) for value in resolved.values), *((value, False) for value in resolved.idle)]
    return [
        {"option": each.key, "value": masked(each.key, to_data(each.value)), "source": each.source, "active": active}
        for each, active in pairs
    ]


def say_next(file: Path) -> None:
    """Prints what to type, now that a configuration file is there."""
    option = "" if file.resolve() == own_path().resolve() else f" --config-file {file}"
    say(f"Type `accel launch{option} script.py` to start a script with it, `accel test{option}` to try it.")


def _text(value: Value) -> str:
    if value.key == "strategy" and value.value is None:
        return f"{DEFAULT_STRATEGIES[0]}, or {DEFAULT_STRATEGIES[1]} for one process"
    shown = masked(value.key, value.value)
    return shown_value(value.value if shown == value.value else shown)
