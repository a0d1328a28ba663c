"""`accel doctor`: why processes do not meet, or not talk, started exactly as a script would be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from accel_launch.commands.examination import Examination
from accel_launch.commands.launch import CONFIG_FILE, HELP, resolve_line
from accel_launch.output import BAD, mark, say
from accel_launch.settings.command_line import Switch
from accel_launch.settings.errors import SettingsError

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

    Takes the options of `accel launch`, on every machine of a run as that does, and needs no
    script. Under Slurm, MPI or torchrun it examines the processes that are there. The exit status
    is 1 if there is a problem.
    """
    examination = Examination("accel doctor", main.__doc__ or "", SWITCHES, _JOB)
    given = examination.read(arguments)
    if given is None:
        return 0
    command_line, catalog = given
    patience, as_json = _seconds(command_line.text("patience")), command_line.switch("json")
    told = ["--patience", str(patience), *(["--json"] if as_json else [])]
    status, verdict = examination.run(resolve_line(command_line, catalog), told)
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
