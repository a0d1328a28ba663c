"""`accel doctor`: why processes do not meet, or not talk, started exactly as a script would be."""

from __future__ import annotations

import os
import secrets
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from accel_launch.commands.launch import CONFIG_FILE, HELP, resolve_line, run
from accel_launch.output import BAD, mark, say
from accel_launch.settings.catalog import Catalog
from accel_launch.settings.command_line import Switch, parse
from accel_launch.settings.errors import SettingsError
from accel_launch.starting.program import Program

if TYPE_CHECKING:
    from accel_launch.settings.resolution import Resolved

SWITCHES: Mapping[str, Switch] = {
    "json": Switch("print what was found as JSON"),
    "patience": Switch(
        "how long ranks try to reach each other before they are said to be stuck; 60 if not given", "SECONDS"
    ),
    "config_file": CONFIG_FILE,
    "help": HELP,
}
_JOB = "accel_launch.checking.doctor_job"


def main(arguments: Sequence[str] | None = None) -> int:
    """Find out why processes do not meet or talk: each pair of ranks, versions and variables of each machine, and what to do.

    Takes the options of `accel launch`, on every machine of a run as that does, and needs no script. Under Slurm, MPI or torchrun it
    examines the processes that are there. The exit status is 1 if there is a problem.
    """
    catalog = Catalog()
    command_line = parse(sys.argv[2:] if arguments is None else arguments, catalog, SWITCHES)
    if command_line.switch("help"):
        from accel_launch.settings.help_page import show_help

        show_help(catalog, "accel doctor [options]", main.__doc__ or "", SWITCHES, command_line.mentioned)
        return 0
    if command_line.rest:
        raise SettingsError(
            f"{command_line.rest[0]} was given, and accel doctor starts a program of its own. Leave it out; accel launch starts yours."
        )
    patience = _seconds(command_line.text("patience"))
    return _judged(resolve_line(command_line, catalog), patience, as_json=bool(command_line.switch("json")))


def _judged(resolved: Resolved, patience: float, *, as_json: bool) -> int:
    path = Path(tempfile.gettempdir()) / f"accel-doctor-{secrets.token_hex(8)}"
    arguments = ["--verdict", str(path), "--launcher", str(os.getpid()), "--patience", str(patience)]
    arguments += ["--json"] if as_json else []
    try:
        status = run(resolved, Program("module", _JOB, tuple(arguments)))
        verdict = path.read_text(encoding="ascii") if path.exists() else ""
    finally:
        path.unlink(missing_ok=True)
    if not verdict and not as_json:
        say(f"{mark(BAD)} The examination broke off. What stands above says where.", BAD)
    return status or (0 if verdict == "well" else 1)


def _seconds(text: str | None) -> float:
    try:
        seconds = 60.0 if text is None else float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise SettingsError(
            f"--patience {text} was given, which is no number of seconds. Give one above 0, such as --patience 60."
        )
    return seconds
