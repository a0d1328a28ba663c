"""Starts a program as `accel launch` does, from options as JSON: `python start_driver.py '{"num_processes": 2}' script.py …`.

A target without `.py` is a program of any kind.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from accel_core import WorldError
from accel_launch.errors import LaunchError
from accel_launch.options import LaunchOptions
from accel_launch.starting.plan import make_plan
from accel_launch.starting.program import Program, start


def main() -> int:
    options, target, *arguments = sys.argv[1:]
    given = json.loads(options)
    if "log_dir" in given:
        given["log_dir"] = Path(given["log_dir"])
    kind = "script" if target.endswith(".py") else "program"
    try:
        plan = make_plan(LaunchOptions(**given), True, os.environ)
        return start(plan, Program(kind, target, tuple(arguments)), os.environ)
    except (LaunchError, WorldError) as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    raise SystemExit(main())
