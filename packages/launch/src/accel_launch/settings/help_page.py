"""The help of `accel launch` and others: options in groups, with docstrings; or of components."""

from __future__ import annotations

import argparse
import os
import shutil
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any, get_args, get_origin

import torch

from accel_core.api.launcher import DEFAULT_STRATEGIES, PREFIX, SECTIONS, choices, members, to_data
from accel_launch.output import say
from accel_launch.settings.catalog import ROLES, SEVERAL, Option, flag_of, has_default
from accel_launch.settings.command_line import CHOOSING, Switch, is_flag
from accel_launch.settings.documentation import opening

if TYPE_CHECKING:
    from accel_launch.settings.catalog import Catalog

_COLUMN, _WIDEST = 34, 120
_KINDS: Mapping[Any, str] = {
    int: "N",
    float: "NUMBER",
    str: "TEXT",
    timedelta: "TIME",
    Path: "PATH",
    torch.dtype: "DTYPE",
}


def show_help(
    catalog: Catalog, usage: str, about: str, switches: Mapping[str, Switch], mentioned: Sequence[str] = ()
) -> None:
    """Prints help: all, or on `mentioned` components; `switches` are the command's options."""
    if mentioned:
        page = _page(usage, "")
        for section in mentioned:
            _add_section(page, catalog, section)
    else:
        page = _page(usage, about)
        add_switches(page.add_argument_group("this command"), switches)
        for group in dict.fromkeys(option.group for option in catalog.own.values()):
            part = page.add_argument_group(group)
            for option in catalog.own.values():
                if option.group == group:
                    name = option.field.name
                    _add(part, option, f"installed: {', '.join(catalog.names(name))}" if name in ROLES else "")
    say(page.format_help().rstrip())
    if not mentioned:
        lines = [textwrap.fill(line, _width(), break_on_hyphens=False) for line in _components(catalog, usage)]
        say("\n" + "\n".join(lines))


def show_switches(usage: str, about: str, switches: Mapping[str, Switch]) -> None:
    """Prints the help of a command that takes no options of a run."""
    page = _page(usage, about)
    add_switches(page.add_argument_group("this command"), switches)
    say(page.format_help().rstrip())


def _page(usage: str, about: str) -> argparse.ArgumentParser:
    """A parser that only lays out help: `command_line` reads the options."""
    layout = partial(argparse.HelpFormatter, max_help_position=_COLUMN, width=_width())
    return argparse.ArgumentParser(
        usage=_plain(usage), description=_plain(about), add_help=False, formatter_class=layout
    )


def _width() -> int:
    return min(shutil.get_terminal_size((100, 24)).columns, _WIDEST)


def add_switches(part: argparse._ActionsContainer, switches: Mapping[str, Switch]) -> None:
    """Adds the rows of a command's own options."""
    for name, switch in switches.items():
        short = [f"-{switch.short}"] if switch.short else []
        add_row(part, [*short, flag_of(name)], switch.takes, switch.help)


def _add_section(page: argparse.ArgumentParser, catalog: Catalog, section: str) -> None:
    options = catalog.section(section).values()
    provider = "accel-core" if section in SECTIONS else catalog.component(section).provider
    words = opening(catalog.constructor(section)[0]).split()
    if all(option.field.python_only for option in options):
        words.append("It has no options.")
    if in_python := [f"{each.field.name} ({each.field.python_only})" for each in options if each.field.python_only]:
        words.append(f"For Python only: {', '.join(in_python)}.")
    part = page.add_argument_group(f"{section}  ({provider})", _plain(" ".join(words)))
    for option in options:
        if not option.field.python_only:
            _add(part, option, option.variable)


def _add(part: argparse._ArgumentGroup, option: Option, further: str = "") -> None:
    """Adds the row of an option, with its default and how it is negated."""
    value, notes = metavar(option), [further] if further else []
    if has_default(option) and option.field.default is not None:
        notes.insert(0, f"default: {shown_value(option.field.default)}")
    if bool in members(option.field.type):
        prefix, dot, name = option.flag.rpartition(".")
        notes.insert(0, f"or {prefix}{dot}no-{name}" if dot else f"or --no-{name.removeprefix('--')}")
    note = f"[{'; '.join(notes)}]" if notes else ""
    flag, value = (f"{option.flag}{value}", "") if value.startswith("[") else (option.flag, value)
    add_row(part, [flag], value, f"{option.help} {note}".strip())


def add_row(
    part: argparse._ActionsContainer, flags: Sequence[str], value: str, about: str, values: Sequence[str] = ()
) -> None:
    """Adds the row of an option; `value` is the placeholder for its value, empty for a flag, `values` are all that it has."""
    if value:
        part.add_argument(*flags, metavar=value, choices=values or None, help=_plain(about))
    else:
        part.add_argument(*flags, action="store_true", help=_plain(about))


def _plain(text: str) -> str:
    """A text in which argparse substitutes nothing."""
    return text.replace("%", "%%")


def metavar(option: Option) -> str:
    """The placeholder for the value of an option: `N`, `{pad,stop,join}`; empty for a flag."""
    kind = option.field.type
    if option.key in ROLES or option.key == "dynamo_backend":
        return "NAME,..." if option.key in SEVERAL else "NAME"
    admitted = [member for member in members(kind) if member is not NoneType]
    if admitted == [bool]:
        return ""
    shown = "|".join(dict.fromkeys(word for member in admitted if (word := _kind(member))))
    return f"[={shown}]" if is_flag(kind) else shown


def shown_value(value: Any) -> str:
    """A value as text would express it: `true`, `bfloat16`, `15m`; `-` for none."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, timedelta):
        seconds = value.total_seconds()
        return f"{seconds / 60:g}m" if seconds >= 60 and seconds % 60 == 0 else f"{seconds:g}s"
    data = to_data(value)
    if isinstance(data, list):
        return ",".join(map(str, data))
    if isinstance(data, dict):
        return ",".join(f"{key}={each}" for key, each in data.items())
    return str(data)


def _kind(kind: Any) -> str:
    """The placeholder for a value of one type; empty for one that text cannot express."""
    origin = get_origin(kind)
    if listed := choices(kind):
        return "true|false" if kind is bool else f"{{{','.join(str(to_data(each)) for each in listed)}}}"
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return "KEY=VALUE,..."
    if isinstance(origin, type) and issubclass(origin, Iterable):
        each = [word for member in members(next(iter(get_args(kind)), str)) if (word := _kind(member))]
        return f"{'|'.join(each)},..."
    if isinstance(origin, type) and issubclass(origin, os.PathLike):
        return "PATH"
    return _KINDS.get(kind, "") if isinstance(kind, type) else ""


def _components(catalog: Catalog, usage: str) -> tuple[str, ...]:
    """What stands below the options: names that choose, where further options are, other places."""
    command = usage.partition(" [")[0]
    flags = [flag_of(name) for role in CHOOSING for name in catalog.names(role) if name != "no"]
    example = next((name for name in catalog.names("strategy") if name not in DEFAULT_STRATEGIES), "ddp")
    several = [name for role in SEVERAL for name in catalog.names(role)]
    others = ", ".join(map(flag_of, (*SECTIONS, *catalog.names("loader"), *several)))
    chosen = f"The name of a strategy or precision is enough to choose it: {' '.join(flags)}."
    further = (
        f"More options: `{command} {flag_of(example)} -h` shows those of {example}, and so for the other names "
        f"and for {others}."
    )
    elsewhere = (
        f"Options can also be variables ({PREFIX}NUM_PROCESSES=2, {PREFIX}PROCESS_GROUP__TIMEOUT=10m), or lines of the "
        "configuration file (`num_processes: 2`, `process_group: {timeout: 10m}`). The command line wins over variables, "
        "and variables over the file."
    )
    return chosen, further, elsewhere
