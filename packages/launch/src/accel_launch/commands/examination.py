"""The common part of `accel test` and `accel doctor`: a job of ours, started like a script, leaves a verdict."""

from __future__ import annotations

import os
import secrets
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from accel_launch.commands.launch import run
from accel_launch.settings.catalog import Catalog
from accel_launch.settings.command_line import CommandLine, Switch, parse
from accel_launch.settings.errors import SettingsError
from accel_launch.starting.program import Program

if TYPE_CHECKING:
    from accel_launch.settings.resolution import Resolved


class Examination:
    """One command of this kind.

    Args:
        name: of the command, as in `accel test`.
        about: what it does.
        switches: its own options.
        job: the module that every rank executes. It is told where to write its verdict by
            `--verdict`, and by `--launcher` the process that reads it.
    """

    def __init__(self, name: str, about: str, switches: Mapping[str, Switch], job: str) -> None:
        self._name, self._about, self._switches, self._job = name, about, switches, job

    def read(self, arguments: Sequence[str] | None) -> tuple[CommandLine, Catalog] | None:
        """Parses `arguments` (None: this process's own); None if they asked for help, which is printed.

        Raises:
            SettingsError: if a program was given.
        """
        catalog = Catalog()
        command_line = parse(sys.argv[2:] if arguments is None else arguments, catalog, self._switches)
        if command_line.switch("help"):
            from accel_launch.settings.help_page import show_help

            show_help(catalog, f"{self._name} [options]", self._about, self._switches, command_line.mentioned)
            return None
        if command_line.rest:
            raise SettingsError(
                f"{command_line.rest[0]} was given, and {self._name} starts a program of its own. Leave it out; accel launch starts yours."
            )
        return command_line, catalog

    def run(self, resolved: Resolved, arguments: Sequence[str]) -> tuple[int, str]:
        """Runs the job; returns the exit status of the run, and the verdict: empty if the job broke off.

        Where one process is started, this one becomes the job, and the function does not return.
        """
        path = Path(tempfile.gettempdir()) / f"{self._name.replace(' ', '-')}-{secrets.token_hex(8)}"
        ours = ("--verdict", str(path), "--launcher", str(os.getpid()))
        try:
            status = run(resolved, Program("module", self._job, (*ours, *arguments)))
            return status, path.read_text(encoding="ascii") if path.exists() else ""
        finally:
            path.unlink(missing_ok=True)
