"""`accel test`: a real check of a set-up, started exactly as a script would be."""

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
    "folder": Switch("a folder that all machines see, in which a checkpoint is saved and loaded", "PATH"),
    "config_file": CONFIG_FILE,
    "help": HELP,
}
_JOB = "accel_launch.checking.setup_job"


def main(arguments: Sequence[str] | None = None) -> int:
    """Check this set-up for real: collectives, data order, training, checkpoints, on as many processes as asked for.

    Takes the options of `accel launch`, reads the same configuration, and ends with a verdict; the exit status is 1 if anything does
    not work.
    """
    catalog = Catalog()
    command_line = parse(sys.argv[2:] if arguments is None else arguments, catalog, SWITCHES)
    if command_line.switch("help"):
        from accel_launch.settings.help_page import show_help

        show_help(catalog, "accel test [options]", main.__doc__ or "", SWITCHES, command_line.mentioned)
        return 0
    if command_line.rest:
        raise SettingsError(
            f"{command_line.rest[0]} was given, and accel test starts a program of its own. Leave it out; accel launch starts yours."
        )
    return _judged(resolve_line(command_line, catalog), command_line.text("folder"))


def _judged(resolved: Resolved, folder: str | None) -> int:
    """The exit status of the check: that of the run, if it broke off; else what the ranks have written down."""
    path = Path(tempfile.gettempdir()) / f"accel-test-{secrets.token_hex(8)}"
    arguments = ["--verdict", str(path), "--launcher", str(os.getpid())]
    if folder is not None:
        arguments += ["--folder", str(_existing(folder))]
    try:
        status = run(resolved, Program("module", _JOB, tuple(arguments)))
        verdict = path.read_text(encoding="ascii") if path.exists() else ""
    finally:
        path.unlink(missing_ok=True)
    if verdict:
        return 0 if verdict == "works" else 1
    if status:
        say(f"{mark(BAD)} This set-up does not work: the check broke off. What stands above says where.", BAD)
    return status


def _existing(folder: str) -> Path:
    path = Path(folder).expanduser().absolute()
    if not path.is_dir():
        raise SettingsError(f"--folder {folder} was given, and there is no such folder. Make it: mkdir -p {path}")
    return path
