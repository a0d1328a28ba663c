"""The program of a run: a script, a module or any other program, with its arguments."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from accel_launch.starting.errors import LaunchError


@dataclass(frozen=True)
class Program:
    """The program that every process of a run executes.

    Args:
        kind: what `target` is: a script for this interpreter, a module of it, or a program of any
            kind.
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
        if self.kind == "script":
            self._check_script(Path(self.target))
        if self.kind == "program" and shutil.which(self.target, path=environ.get("PATH")) is None:
            raise LaunchError(f"{self.target!r} was to be started as a program, and {self._why_not()}")

    def _check_script(self, path: Path) -> None:
        """Python runs files, and folders that have a `__main__.py`; an empty path would be the folder it stands in."""
        if not self.target or not path.exists():
            raise LaunchError(
                f"{self.target or 'an empty path'} was to be started, and there is no such file in {Path.cwd()}. Give the path of a "
                f"script; or -m and the name of a module."
            )
        if path.is_dir() and not (path / "__main__.py").exists():
            raise LaunchError(
                f"{self.target} was to be started, and it is a folder without a __main__.py. Give the path of a script in it; or -m "
                f"and the name of a module."
            )

    def _why_not(self) -> str:
        """The reason why a program cannot be executed, and what to type."""
        if os.path.dirname(self.target) and os.path.isfile(self.target):
            return (
                f"that file may not be executed. Type chmod +x {shlex.quote(self.target)}; or leave --no-python out if it is a "
                f"Python script."
            )
        return (
            f"no executable file of that name was found on the PATH. Give its path, such as ./{Path(self.target).name or 'program'}; "
            f"or leave --no-python out if it is a Python script."
        )
