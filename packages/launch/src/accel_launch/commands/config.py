"""`accel config`: writes the configuration file, and shows what holds and why."""

from __future__ import annotations

import argparse
import json
import os
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from accel_core.api.component import nearest
from accel_core.api.launcher import to_data, variable_of
from accel_launch.commands.launch import CONFIG_FILE, HELP, resolve_line
from accel_launch.errors import SettingsError
from accel_launch.output import GOOD, say, table, warn
from accel_launch.settings import completion
from accel_launch.settings.catalog import Catalog
from accel_launch.settings.command_line import CommandLine, Switch, parse
from accel_launch.settings.files import chosen_path, load, own_path, write
from accel_launch.settings.resolution import resolve
from accel_launch.settings.showing import as_data, say_next, show
from accel_launch.starting.devices import find_accelerators

_HELP = Switch("show this page", short="h")
_TARGET: Mapping[str, Switch] = {"config_file": Switch("write this file instead of your own", "PATH"), "help": _HELP}
_TO_WRITE: Mapping[str, Switch] = {**_TARGET, "force": Switch("replace a file that is there already")}
_TO_READ: Mapping[str, Switch] = {"config_file": CONFIG_FILE, "help": _HELP}


class Part(NamedTuple):
    """One subcommand."""

    run: Callable[[CommandLine, Catalog], int]  # does it, given its command line, and returns the exit status
    switches: Mapping[str, Switch]  # its own options
    about: str  # what it does
    operand: str = ""  # what may stand behind the options; empty for nothing
    takes_options: bool = False  # whether it takes the options of `accel launch` as well


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the configuration file by answering questions; show, check or import one.

    Without a subcommand it asks.
    """
    given = list(sys.argv[2:] if arguments is None else arguments)
    name = given.pop(0) if given and not given[0].startswith("-") else ""
    if name not in PARTS:
        known = [each for each in PARTS if each]
        meant = nearest(name, known)
        hint = f"Type `accel config {meant}` if that was meant." if meant else "`accel config -h` says what each does."
        about = f"there is no such subcommand. Known: {', '.join(known)}. {hint}"
        raise SettingsError(f"accel config {name} was asked for, and {about}")
    part, catalog = PARTS[name], Catalog()
    command_line = parse(given, catalog, part.switches)
    if command_line.switch("help"):
        _help(name, part, catalog, command_line)
        return 0
    _check_operands(name, part, command_line)
    return part.run(command_line, catalog)


def parser() -> argparse.ArgumentParser:
    """The subcommands and their options, for scripts that complete them."""
    page = completion.switch_parser("accel config", PARTS[""].switches, "")
    commands = page.add_subparsers()
    for name, part in PARTS.items():
        make = completion.run_parser if part.takes_options else completion.switch_parser
        if name:
            of = make(f"accel config {name}", part.switches, part.operand and "file")
            commands.add_parser(name, help=part.about, parents=[of], conflict_handler="resolve")
    return page


def _help(name: str, part: Part, catalog: Catalog, command_line: CommandLine) -> None:
    from accel_launch.settings.help_page import show_help, show_switches

    usage = " ".join(filter(None, ("accel config", name, "[options]", part.operand)))
    if part.takes_options:
        show_help(catalog, usage, part.about, part.switches, command_line.mentioned)
        return
    show_switches(usage, part.about, part.switches)
    if not name:
        say()
        table(("subcommand", "what it does"), [(each, PARTS[each].about) for each in PARTS if each])
        say("\n`accel config SUBCOMMAND -h` describes one subcommand.")


def _check_operands(name: str, part: Part, command_line: CommandLine) -> None:
    most, command = 1 if part.operand else 0, f"accel config {name}".strip()
    end = f"`{command} -h` says what it takes."
    if len(command_line.rest) > most:
        files = "one file" if most else "no file"
        raise SettingsError(f"{command} was given {' '.join(command_line.rest)}, and it takes {files}. {end}")
    if command_line.given and not part.takes_options:
        raise SettingsError(f"{command_line.given[0].source} was given, and {command} takes no option of a run. {end}")


def _ask(command_line: CommandLine, catalog: Catalog) -> int:
    from accel_launch.questionnaire import ask

    return ask(catalog, _target(command_line))


def _write_default(command_line: CommandLine, catalog: Catalog) -> int:
    """Writes what was given, and the number of processes that suits this machine."""
    target = _target(command_line)
    if target.exists() and not command_line.switch("force"):
        raise SettingsError(
            f"{target} is there already, and would be replaced: nothing was written. Add --force, or another --config-file."
        )
    resolved = resolve(catalog, command_line, None, {}, thorough=True)
    data: dict[str, Any] = {}
    if ("", "num_processes") not in resolved.given:
        data["num_processes"] = 1 if resolved.get("cpu").value else max(1, find_accelerators().count)
    for value in resolved.given.values():
        inner = data.setdefault(value.section, {}) if value.section else data
        inner[value.option] = to_data(value.value)
    write(target, data, resolved.catalog.help_of(data), anew=True)
    say(f"{target} is written.", GOOD)
    say_next(target)
    return 0


def _show(command_line: CommandLine, catalog: Catalog) -> int:
    resolved = resolve_line(command_line, catalog)
    if command_line.switch("json"):
        say(json.dumps(as_data(resolved), indent=2))
        return 0
    show(resolved, defaults=command_line.switch("all"))
    return 0


def _validate(command_line: CommandLine, catalog: Catalog) -> int:
    """Checks a file alone: what the environment says is not its fault."""
    asked = command_line.rest[0] if command_line.rest else command_line.text("config_file")
    try:
        file = load(asked, os.environ)
        if file is None:
            say(f"There is no configuration file, so defaults hold. Type `accel config` to write {own_path()}.")
            return 0
        resolved = resolve(catalog, CommandLine(), file, {}, thorough=True)
        _check_backend(resolved.get("dynamo_backend").value)
    except SettingsError as error:
        warn(f"{len(error.problems)} mistake{'s' if len(error.problems) > 1 else ''}:")
        for problem in error.problems:
            warn(textwrap.indent(problem, "  "))
        return 1
    for note in resolved.notes:
        warn(note)
    count = len(resolved.given) + len(resolved.idle)
    say(f"{file.path} is in order: {count} option{'' if count == 1 else 's'}.", GOOD)
    return 0


def _check_backend(name: str) -> None:
    """Raises `SettingsError` for no backend of `torch.compile`; slow, so for files only."""
    if name.lower() in {"no", "eager"}:
        return
    import torch

    known = torch.compiler.list_backends(exclude_tags=())
    if name.lower() not in known:
        meant = nearest(name, known)
        hint = f" Type {meant!r} if that was meant." if meant else ""
        raise SettingsError(
            f"dynamo_backend={name!r} is not a backend of torch.compile. Known: {', '.join(known)}.{hint}"
        )


def _path(command_line: CommandLine, _: Catalog) -> int:
    asked = command_line.text("config_file")
    path = chosen_path(asked, os.environ)
    say(str(path))
    if not path.exists():
        file = None if asked else load(None, {**os.environ, variable_of("config_file"): ""})
        beside = "" if file is None else f" {file.path}, of Accelerate, is read in its place."
        warn(f"There is no such file yet: `accel config` writes it.{beside}")
    return 0


def _import(command_line: CommandLine, _: Catalog) -> int:
    from accel_launch.importing.command import import_file

    source = Path(command_line.rest[0]).expanduser() if command_line.rest else None
    return import_file(source, _target(command_line), command_line.switch("force"))


def _target(command_line: CommandLine) -> Path:
    return chosen_path(command_line.text("config_file"), os.environ)


PARTS: Mapping[str, Part] = {
    "": Part(_ask, _TARGET, "Ask ten questions and write the configuration file."),
    "default": Part(
        _write_default,
        {**_TO_WRITE, "help": HELP},
        "Write a file that suits this machine, without questions. Takes the options of `accel launch`.",
        takes_options=True,
    ),
    "show": Part(
        _show,
        {
            "all": Switch("show the options that have their defaults, too"),
            "json": Switch("print every option as JSON, for programs"),
            "config_file": CONFIG_FILE,
            "help": HELP,
        },
        "Show what is set, and where it was set. Takes the options of `accel launch`.",
        takes_options=True,
    ),
    "validate": Part(_validate, _TO_READ, "Check a file and list all mistakes in it.", "[FILE]"),
    "path": Part(_path, _TO_READ, "Print the path of the file."),
    "import": Part(_import, _TO_WRITE, "Convert a configuration file of Accelerate.", "[FILE]"),
}
"""The subcommands; the one without a name is `accel config` itself."""
