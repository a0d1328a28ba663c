"""`accel test`: a real check of a set-up, started exactly as a script would be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from accel_launch.commands.examination import Examination
from accel_launch.commands.launch import CONFIG_FILE, HELP, resolve_line
from accel_launch.output import BAD, mark, say
from accel_launch.settings.command_line import Switch
from accel_launch.settings.errors import SettingsError

SWITCHES: Mapping[str, Switch] = {
    "folder": Switch("a folder that all machines see, in which a checkpoint is saved and loaded", "PATH"),
    "config_file": CONFIG_FILE,
    "help": HELP,
}
_JOB = "accel_launch.checking.setup_job"


def main(arguments: Sequence[str] | None = None) -> int:
    """Check this set-up for real: collectives, data order, training, checkpoints, on as many processes as asked for.

    Takes the options of `accel launch`, reads the same configuration, and ends with a verdict; the
    exit status is 1 if anything does not work.
    """
    examination = Examination("accel test", main.__doc__ or "", SWITCHES, _JOB)
    given = examination.read(arguments)
    if given is None:
        return 0
    command_line, catalog = given
    folder = command_line.text("folder")
    told = [] if folder is None else ["--folder", str(_existing(folder))]
    status, verdict = examination.run(resolve_line(command_line, catalog), told)
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
