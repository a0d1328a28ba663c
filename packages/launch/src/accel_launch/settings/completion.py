"""The options of a run as a parser of argparse, from which scripts for shells are made.

Command lines are read by `command_line`, and not by it.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping

from accel_core import PluginError
from accel_core.api.launcher import choices, members, to_data
from accel_launch.output import warn
from accel_launch.settings.catalog import ROLES, SEVERAL, Catalog, Option, flag_of
from accel_launch.settings.command_line import CHOOSING, Switch, is_flag
from accel_launch.settings.help_page import add_row, add_switches, metavar


def run_parser(prog: str, switches: Mapping[str, Switch], operand: str) -> argparse.ArgumentParser:
    """A command's own switches, every option of a run and of what is installed, and what is started.

    Imports all components; says of a broken one that its options are left out.
    """
    catalog, page = Catalog(), switch_parser(prog, switches, operand)
    for role in CHOOSING:
        for name in catalog.names(role):
            add_row(page, [flag_of(name)], "", f"chooses this {role.replace('_', ' ')}")
    for option in catalog.own.values():
        _add_option(page, option, catalog.names(option.key) if option.key in ROLES else _values(option))
    for section in catalog.sections:
        try:
            options = catalog.section(section)
        except PluginError as error:
            warn(f"accel: the options of {section} are left out: {error}")
            continue
        for option in options.values():
            if not option.field.python_only:
                _add_option(page, option, _values(option))
    return page


def switch_parser(prog: str, switches: Mapping[str, Switch], operand: str) -> argparse.ArgumentParser:
    """A command's own switches, and a word behind them; empty: none."""
    page = argparse.ArgumentParser(prog=prog, add_help=False, conflict_handler="resolve")
    add_switches(page, switches)
    if operand:
        page.add_argument(operand, nargs="*")
    return page


def _add_option(page: argparse.ArgumentParser, option: Option, values: list[str]) -> None:
    """Adds an option with the first sentence of its help, and its negation."""
    about = option.help.partition(". ")[0].partition("; ")[0]
    takes = "" if is_flag(option.field.type) else metavar(option) or "VALUE"
    add_row(page, [option.flag], takes, about, values if option.key not in SEVERAL else [])
    if bool in members(option.field.type):
        prefix, dot, name = option.flag.removeprefix("--").rpartition(".")
        add_row(page, [f"--{prefix}{dot}no-{name}"], "", f"not {option.flag}")


def _values(option: Option) -> list[str]:
    """The values of an option that takes one of a few."""
    listed = [each for kind in members(option.field.type) for each in choices(kind) or ()]
    return [str(to_data(each)) for each in listed if not isinstance(each, bool) and each is not None]
