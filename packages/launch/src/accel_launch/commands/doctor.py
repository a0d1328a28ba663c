"""`accel doctor`: why processes do not meet, or not talk, started exactly as a script would be."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from accel_core.api.launcher import find
from accel_launch.commands.examination import examine
from accel_launch.commands.launch import CONFIG_FILE, HELP
from accel_launch.errors import SettingsError
from accel_launch.output import BAD, mark, warn
from accel_launch.settings import completion
from accel_launch.settings.command_line import Switch

if TYPE_CHECKING:
    from accel_launch.settings.command_line import CommandLine

SWITCHES: Mapping[str, Switch] = {
    "json": Switch("print what was found as JSON"),
    "patience": Switch("seconds to wait for a connection between processes (default: 60)", "SECONDS"),
    "config_file": CONFIG_FILE,
    "help": HELP,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Find out why processes do not reach each other, or check a script written for Accelerate.

    Type it on every machine of the run, with the options of `accel launch` and without a script.
    Under Slurm, MPI or torchrun it examines the processes that they started. The exit status is 1
    if there is a problem. `accel doctor script.py` does what `accel check-script script.py` does:
    the script is read, and not run.
    """
    given = list(sys.argv[2:] if arguments is None else arguments)
    if any(word.endswith(".py") and not word.startswith("-") for word in given):
        return int(find("accel.commands", "check-script").load()(given) or 0)
    job = "accel_launch.checking.doctor_job"
    status, is_well = examine("doctor", main.__doc__ or "", SWITCHES, given, job, _words)
    if is_well is None:
        warn(f"{mark(BAD)} The examination broke off. What stands above says where.", BAD)
    return status or int(not is_well)


def parser() -> argparse.ArgumentParser:
    """The options, for scripts that complete them."""
    return completion.run_parser("accel doctor", SWITCHES, "script")


def _words(command_line: CommandLine) -> list[str]:
    text, seconds = command_line.text("patience") or "60", 0.0
    with suppress(ValueError):
        seconds = float(text)
    if not 0 < seconds < float("inf"):
        raise SettingsError(
            f"--patience {text} was given, which is no number of seconds. Give one above 0, such as --patience 60."
        )
    return ["--patience", text, *(["--json"] if command_line.switch("json") else [])]
