"""From a plan to processes, and to the exit status of the run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

from accel_launch.starting.signals import Ended, Signals

if TYPE_CHECKING:
    from accel_launch.starting.plan import Plan
    from accel_launch.starting.program import Program


def start(plan: Plan, program: Program, environment: Mapping[str, str]) -> int:
    """Starts what a plan says, stays until it has ended, and returns the exit status.

    Where one process is started and nothing is to be looked after, this process becomes the program: the
    function does not return. The status is that of the rank that failed first, 128 and the number of
    the signal if one killed it; 128 and the number of the signal that this process was sent; else 0.
    Raises `LaunchError` if there is no such program or rendezvous.
    """
    program.check(environment)
    whole = {**environment, **plan.variables}
    if plan.way != "agent":
        return _become(program, whole)
    with Signals() as signals:
        try:
            with signals.held():  # an import that is broken off ends in any error
                from accel_launch.starting.report import run_and_report  # torch, which not every start needs

            return run_and_report(plan, program, whole, signals)
        except Ended:
            assert signals.received is not None, "that is what Ended says"
            return 128 + signals.received


def _become(program: Program, environment: Mapping[str, str]) -> int:
    argv = program.argv()
    if sys.platform == "win32":
        return subprocess.run(argv, env=environment, check=False).returncode
    sys.stdout.flush()
    sys.stderr.flush()
    for name in ("SIGPIPE", "SIGXFSZ"):  # which Python ignores, and whoever is executed would go on to ignore
        signal.signal(getattr(signal, name), signal.SIG_DFL)
    os.execvpe(argv[0], argv, environment)  # noqa: S606  (a list, no shell)
    raise AssertionError("it never returns")
