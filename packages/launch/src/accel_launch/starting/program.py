"""The program of a run, and from a plan to its processes and the exit status."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from accel_launch.errors import LaunchError
from accel_launch.starting.signals import Ended, Signals

if TYPE_CHECKING:
    from accel_launch.starting.plan import Plan


class Program(NamedTuple):
    """The program of every process of a run: a script, a module or any other, with arguments."""

    kind: Literal["script", "module", "program"]
    target: str  # the script's path, the module's name, or the program's name or path
    arguments: tuple[str, ...] = ()

    def argv(self) -> list[str]:
        """The command line. Python writes output at once (`-u`): a killed rank loses nothing."""
        python = {"script": [sys.executable, "-u"], "module": [sys.executable, "-u", "-m"], "program": []}
        return [*python[self.kind], self.target, *self.arguments]

    def check(self, environ: Mapping[str, str]) -> None:
        """Raises `LaunchError` if there is no such script or program, before any process starts."""
        path, asked = Path(self.target), f"{self.target or 'an empty path'} was to be started"
        if self.kind == "script" and (not self.target or not path.exists()):
            raise LaunchError(
                f"{asked}, and there is no such file in {Path.cwd()}. Give the path of a script; or -m and a module."
            )
        if self.kind == "program" and shutil.which(self.target, path=environ.get("PATH")) is None:
            raise LaunchError(
                f"{asked} as a program, and no executable file of that name was found. Give its path, such as "
                f"./{path.name or 'program'}, and type chmod +x for a file of your own; or leave --no-python out."
            )


def start(plan: Plan, program: Program, environment: Mapping[str, str], *, stays: bool = False) -> int:
    """Starts what a plan says, stays until it has ended, and returns the exit status.

    If one process is started and nothing is to be looked after, this process becomes the program:
    the function does not return, unless it `stays`. The status is that of the rank that failed first, or 128 and the
    number of the signal that killed it; 128 and that of the signal sent to this process; else 0.
    Raises `LaunchError` if there is no such program or rendezvous.
    """
    program.check(environment)
    whole = {**environment, **plan.variables}
    if plan.way != "agent":
        return _become(program, whole, stays)
    with Signals() as signals:
        try:
            with signals.held():  # an import that is broken off ends in any error
                from accel_launch.starting.supervision import run_and_report  # torch, which not every start needs

            return run_and_report(plan, program, whole, signals)
        except Ended:
            assert signals.received is not None, "that is what Ended says"
            return 128 + signals.received


def _become(program: Program, environment: Mapping[str, str], stays: bool) -> int:
    argv = program.argv()
    if stays or sys.platform == "win32":
        return subprocess.run(argv, env=environment, check=False).returncode
    sys.stdout.flush()
    sys.stderr.flush()
    for name in ("SIGPIPE", "SIGXFSZ"):  # which Python ignores, and whoever is executed would go on to ignore
        signal.signal(getattr(signal, name), signal.SIG_DFL)
    os.execvpe(argv[0], argv, environment)  # noqa: S606  (a list, no shell)
    raise AssertionError("it never returns")
