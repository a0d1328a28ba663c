"""P12: from the command to the first line of the script, in as many processes as the row says."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

FIRST_LINE = """
import os, pathlib, time
pathlib.Path(os.environ["FIRST_LINES"], os.environ.get("RANK", "0")).write_text(repr(time.time()))
"""

BIN = Path(sys.executable).parent
COMMANDS = {
    "plain": [BIN / "torchrun", "--standalone", "--nproc-per-node", "{world}"],
    "accel": [BIN / "accel", "launch", "--num-processes", "{world}"],
    "accelerate": [BIN / "accelerate", "launch", "--cpu", "--num_processes", "{world}"],
    "fabric": [BIN / "fabric", "run", "--accelerator", "cpu", "--devices", "{world}"],
}
WORLDS = {"two": 2, "one": 1}
ALONE = ("accelerate",)
"""Without accelerators its launcher starts one process, however many it was asked for."""


def measure(libraries: Sequence[str], rounds: int) -> list[dict[str, dict[str, float]]]:
    """Seconds until all processes have come to the first line: two of them, and one.

    The launchers take turns. A first round, which writes the .pyc files that are missing, is thrown away.
    """
    names = ["plain", *(name for name in libraries if name in COMMANDS)]
    return [{name: _turn(name) for name in names} for _ in range(rounds + 1)][1:]


def _turn(name: str) -> dict[str, float]:
    return {figure: _start(name, world) for figure, world in WORLDS.items() if world == 1 or name not in ALONE}


def _start(name: str, world: int) -> float:
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "script.py")
        script.write_text(FIRST_LINE, encoding="utf-8")
        command = [str(part).format(world=world) for part in COMMANDS[name]]
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
        environment |= {"FIRST_LINES": folder, "OMP_NUM_THREADS": "1", "XDG_CONFIG_HOME": folder}
        begun = time.time()
        subprocess.run([*command, str(script)], env=environment, capture_output=True, check=True, timeout=120)
        lines = [float(Path(folder, str(rank)).read_text(encoding="utf-8")) for rank in range(world)]
    return max(lines) - begun
