"""What is started: a script, a module or any other program, with its arguments."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from accel_launch.starting.errors import LaunchError


@dataclass(frozen=True)
class Program:
    """What every process of a run executes.

    Args:
        kind: what `target` is: a script for this interpreter, a module of it, or a program of any kind.
        target: the script's path, the module's name, or the program's name or path.
        arguments: what it is given on its command line.
    """

    kind: Literal["script", "module", "program"]
    target: str
    arguments: tuple[str, ...] = ()

    def argv(self) -> list[str]:
        """The command line. Python writes its output at once (`-u`), so that nothing is lost when a rank is killed."""
        python = {"script": [sys.executable, "-u"], "module": [sys.executable, "-u", "-m"], "program": []}
        return [*python[self.kind], self.target, *self.arguments]

    def check(self, environ: Mapping[str, str]) -> None:
        """Raises `LaunchError` if there is no such script or program, once here instead of once in every process."""
        if self.kind == "script" and not Path(self.target).exists():
            raise LaunchError(
                f"{self.target} was to be started, and there is no such file in {Path.cwd()}. Give the path of a script; or "
                f"-m and the name of a module."
            )
        if self.kind == "program" and shutil.which(self.target, path=environ.get("PATH")) is None:
            raise LaunchError(
                f"{self.target} was to be started as a program, and no executable file of that name was found on the PATH. "
                f"Give its path, such as ./{Path(self.target).name}; or leave --no-python out if it is a Python script."
            )
