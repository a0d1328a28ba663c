"""`accel test`: a real check of a set-up, started exactly as a script would be."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from accel_launch.commands.examination import examine
from accel_launch.commands.launch import CONFIG_FILE, HELP
from accel_launch.errors import SettingsError
from accel_launch.output import BAD, mark, say
from accel_launch.settings import completion
from accel_launch.settings.command_line import Switch

if TYPE_CHECKING:
    from accel_launch.settings.command_line import CommandLine

SWITCHES: Mapping[str, Switch] = {
    "folder": Switch("a folder that all machines see, in which a checkpoint is saved and loaded", "PATH"),
    "config_file": CONFIG_FILE,
    "help": HELP,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Train a small model on this set-up, and check communication, data and checkpoints.

    Takes the options of `accel launch`, reads the same configuration, and ends with a verdict; the
    exit status is 1 if anything does not work.
    """
    job = "accel_launch.checking.setup_job"
    status, works = examine("test", main.__doc__ or "", SWITCHES, arguments, job, _words)
    if works is None and status:
        say(f"{mark(BAD)} This set-up does not work: the check broke off. What stands above says where.", BAD)
    return status if works is None else int(not works)


def parser() -> argparse.ArgumentParser:
    """The options, for scripts that complete them."""
    return completion.run_parser("accel test", SWITCHES, "")


def _words(command_line: CommandLine) -> list[str]:
    folder = command_line.text("folder")
    if folder is None:
        return []
    path = Path(folder).expanduser().absolute()
    if not path.is_dir():
        raise SettingsError(f"--folder {folder} was given, and there is no such folder. Make it: mkdir -p {path}")
    return ["--folder", str(path)]
