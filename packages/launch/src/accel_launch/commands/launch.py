"""`accel launch`: starts a script, a module or any program in as many processes as asked for."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from accel_core.api.launcher import CHANNEL, masked_words
from accel_launch.errors import SettingsError
from accel_launch.output import say, table, warn
from accel_launch.settings import completion
from accel_launch.settings.catalog import Catalog
from accel_launch.settings.command_line import CommandLine, Switch, parse
from accel_launch.settings.files import load
from accel_launch.settings.resolution import Resolved, resolve
from accel_launch.starting.plan import make_plan
from accel_launch.starting.program import Program, start

CONFIG_FILE = Switch(
    "read this configuration file instead of your own; `accel config path` prints where yours is", "PATH"
)
HELP = Switch("show this page; after --fsdp, show the options of fsdp", short="h")
SWITCHES: Mapping[str, Switch] = {
    "module": Switch("start a module by its name, as `python -m` does", short="m"),
    "no_python": Switch("start a program that is not a Python script"),
    "dry_run": Switch("show what would start, and where each value comes from; start nothing"),
    "config_file": CONFIG_FILE,
    "help": HELP,
}
_NONE: Mapping[str, str] = MappingProxyType({})
_USAGE = "accel launch [options] script.py [arguments of the script]"


def main(arguments: Sequence[str] | None = None, variables: Mapping[str, str] = _NONE, *, stays: bool = False) -> int:
    """Start a script in several processes, on this machine or on several.

    Options before the script are for accel; arguments after it are for the script. An option on the
    command line counts before a variable, and a variable before the configuration file.
    """
    catalog = Catalog()
    command_line = parse(sys.argv[2:] if arguments is None else arguments, catalog, SWITCHES)
    if command_line.switch("help"):
        from accel_launch.settings.help_page import show_help

        show_help(catalog, _USAGE, main.__doc__ or "", SWITCHES, command_line.mentioned)
        return 0
    resolved = resolve_line(command_line, catalog)
    if command_line.switch("dry_run"):
        return _show(resolved, _program(command_line) if command_line.rest else None)
    program = _program(command_line)
    return run(resolved, program, variables, stays=stays)


def parser() -> argparse.ArgumentParser:
    """The options, for scripts that complete them."""
    return completion.run_parser("accel launch", SWITCHES, "script")


def resolve_line(command_line: CommandLine, catalog: Catalog) -> Resolved:
    """Resolves a command line, the environment and the file; prints notes to standard error."""
    file = load(command_line.text("config_file"), os.environ)
    resolved = resolve(catalog, command_line, file, os.environ)
    for note in resolved.notes:
        warn(f"accel: {note}")
    return resolved


def run(resolved: Resolved, program: Program, variables: Mapping[str, str] = _NONE, *, stays: bool = False) -> int:
    """Starts a resolved program, returns its exit status; `LaunchError` if it cannot start here.

    `variables` are added to the environment of its processes. `stays`: as in `start`.
    """
    program.check(os.environ)
    plan = make_plan(resolved.launch, bool(resolved.get("cpu").value), os.environ)
    return start(plan, program, {**os.environ, **variables, CHANNEL: resolved.channel}, stays=stays)


def _program(command_line: CommandLine) -> Program:
    """The program that a command line asks to start."""
    is_module, is_program = command_line.switch("module"), command_line.switch("no_python")
    if is_module and is_program:
        raise SettingsError(
            "--module and --no-python were both given, and a program is one or the other. Leave one out."
        )
    if not command_line.rest:
        raise SettingsError(
            "Nothing was given that could be started. Type a script after the options: accel launch --num-processes 2 script.py"
        )
    target, *arguments = command_line.rest
    return Program("module" if is_module else "program" if is_program else "script", target, tuple(arguments))


def _show(resolved: Resolved, program: Program | None) -> int:
    """Prints what holds and what would be started."""
    from accel_launch.settings.showing import show

    if program is not None:
        program.check(os.environ)
    plan = make_plan(resolved.launch, bool(resolved.get("cpu").value), os.environ)
    show(resolved)
    say()
    command = [("command", shlex.join(masked_words(program.argv())))] if program else []
    table(("what would be started", ""), [*plan.describe(), *command])
    return 0
