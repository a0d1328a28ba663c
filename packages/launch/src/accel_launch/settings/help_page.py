"""The help of `accel launch` and its like: every option with its help from a docstring, in groups; or those of one component."""

from __future__ import annotations

import os
import shutil
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any, get_args, get_origin

import torch

from accel_core.api.launcher import DEFAULT_STRATEGIES, PREFIX, SECTIONS, choices, members, to_data
from accel_launch.output import console, is_plain, say
from accel_launch.settings.catalog import ROLES, SEVERAL, Option, has_default
from accel_launch.settings.command_line import CHOOSING, Switch, is_flag
from accel_launch.settings.documentation import opening

if TYPE_CHECKING:
    from accel_launch.settings.catalog import Catalog

_INDENT, _COLUMN, _WIDEST = 2, 34, 120
_KINDS: Mapping[Any, str] = {
    int: "N",
    float: "NUMBER",
    str: "TEXT",
    timedelta: "TIME",
    Path: "PATH",
    torch.dtype: "DTYPE",
}

Line = Sequence[tuple[str, str]]
"""Pieces of one line, each with its style."""


def show_help(
    catalog: Catalog, usage: str, about: str, switches: Mapping[str, Switch], mentioned: Sequence[str] = ()
) -> None:
    """Prints help.

    Args:
        catalog: the options of what is installed.
        usage: how the command is typed.
        about: what it does.
        switches: its own options.
        mentioned: components; if there are any, the help is about their options alone.
    """
    width = min(shutil.get_terminal_size((100, 24)).columns, _WIDEST)
    lines: list[Line] = [[("usage: ", "bold"), (usage, "")], []]
    if mentioned:
        for section in mentioned:
            lines += _of_section(catalog, section, width)
    else:
        lines += [*_paragraph(about, width), [], *_of_command(switches, width), *_of_run(catalog, width)]
        lines += _components(catalog, usage, width)
    _print(lines)


def show_switches(usage: str, about: str, switches: Mapping[str, Switch]) -> None:
    """Prints the help of a command that takes no options of a run."""
    width = min(shutil.get_terminal_size((100, 24)).columns, _WIDEST)
    lines: list[Line] = [[("usage: ", "bold"), (usage, "")], [], *_paragraph(about, width), []]
    _print([*lines, *_of_command(switches, width)[:-1]])


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


def _of_command(switches: Mapping[str, Switch], width: int) -> list[Line]:
    lines: list[Line] = [[("this command", "bold")]]
    for name, switch in switches.items():
        short = f"-{switch.short}, " if switch.short else ""
        flag = f"{short}--{name.replace('_', '-')}{f' {switch.takes}' if switch.takes else ''}"
        lines += _row(flag, switch.help, width)
    return [*lines, []]


def _of_run(catalog: Catalog, width: int) -> list[Line]:
    lines: list[Line] = []
    groups = dict.fromkeys(option.group for option in catalog.own.values())
    for group in groups:
        lines.append([(group, "bold")])
        for option in catalog.own.values():
            if option.group == group:
                lines += _option(option, width, _names_of(catalog, option.field.name))
        lines.append([])
    return lines


def _names_of(catalog: Catalog, option: str) -> str:
    return f"installed: {', '.join(catalog.names(option))}" if option in ROLES else ""


def _components(catalog: Catalog, usage: str, width: int) -> list[Line]:
    command = usage.partition(" [")[0]
    flags = [f"--{name}".replace("_", "-") for role in CHOOSING for name in catalog.names(role)]
    example = next((name for name in catalog.names("strategy") if name not in DEFAULT_STRATEGIES), "ddp")
    several = [name for role in SEVERAL for name in catalog.names(role)]
    always = ", ".join(f"--{name}".replace("_", "-") for name in (*SECTIONS, *catalog.names("loader"), *several))
    text = (
        f"A strategy or a precision is also chosen by its name: {' '.join(flags)}. Its own options begin with its name: "
        f"`{command} --{example.replace('_', '-')} -h` shows them, and so for {always}. Each option has a variable, such as "
        f"{PREFIX}NUM_PROCESSES for --num-processes and {PREFIX}PROCESS_GROUP__TIMEOUT for --process-group.timeout, and stands in files "
        f"as `num_processes: 2` and `process_group: {{timeout: 10m}}`. The command line wins over variables, and those over the file."
    )
    return _paragraph(text, width)


def _of_section(catalog: Catalog, section: str, width: int) -> list[Line]:
    options = catalog.section(section)
    provider = "accel-core" if section in SECTIONS else catalog.component(section).provider
    owner = SECTIONS[section].handler if section in SECTIONS else catalog.component(section).load()
    lines: list[Line] = [[(section, "bold"), (f"  ({provider})", "dim")], *_paragraph(opening(owner), width), []]
    for option in options.values():
        if not option.field.python_only:
            lines += _option(option, width, option.variable)
    if all(option.field.python_only for option in options.values()):
        lines.append([("  It has no options.", "")])
    in_python = [option.field for option in options.values() if option.field.python_only]
    if in_python:
        words = ", ".join(f"{field.name} ({field.python_only})" for field in in_python)
        lines += [[], *_paragraph(f"For Python only: {words}.", width)]
    return [*lines, []]


def _option(option: Option, width: int, further: str = "") -> list[Line]:
    value = metavar(option)
    flag = f"{option.flag}{value if value.startswith('[') else f' {value}' if value else ''}"
    notes = [further] if further else []
    if has_default(option) and option.field.default is not None:
        notes.insert(0, f"default: {shown_value(option.field.default)}")
    if bool in members(option.field.type):
        prefix, dot, name = option.flag.rpartition(".")
        notes.insert(0, f"or {prefix}{dot}no-{name}" if dot else f"or --no-{name.removeprefix('--')}")
    return _row(flag, option.help, width, f"[{'; '.join(notes)}]" if notes else "")


def _row(flag: str, text: str, width: int, note: str = "") -> list[Line]:
    wrapped = textwrap.wrap(f"{text} {note}".strip(), max(width - _COLUMN, 30), break_on_hyphens=False)
    first = f"{' ' * _INDENT}{flag}"
    lines: list[Line] = []
    if len(first) > _COLUMN - 2 or not wrapped:
        lines.append([(first, "cyan")])
        rest = wrapped
    else:
        lines.append([(first.ljust(_COLUMN), "cyan"), (wrapped[0], "")])
        rest = wrapped[1:]
    return [*lines, *([(" " * _COLUMN + line, "")] for line in rest)]


def _paragraph(text: str, width: int) -> list[Line]:
    return [[(line, "")] for line in textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)]


def _print(lines: Iterable[Line]) -> None:
    if is_plain():
        say("\n".join("".join(text for text, _ in line) for line in lines).rstrip())
        return
    from rich.text import Text

    shown = console()
    for line in lines:
        shown.print(Text.assemble(*line))
