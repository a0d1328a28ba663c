"""The common part of `accel test` and `accel doctor`: starts a job of ours, reads its verdict."""

from __future__ import annotations

import os
import secrets
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from accel_launch.commands.launch import resolve_line, run
from accel_launch.errors import SettingsError
from accel_launch.settings.catalog import Catalog
from accel_launch.settings.command_line import parse
from accel_launch.starting.program import Program

if TYPE_CHECKING:
    from accel_launch.settings.command_line import CommandLine, Switch


def examine(
    name: str,
    about: str,
    switches: Mapping[str, Switch],
    arguments: Sequence[str] | None,
    job: str,
    words: Callable[[CommandLine], list[str]],
) -> tuple[int, bool | None]:
    """Reads the command line of `accel name`, and runs the module `job` with `words` on every rank.

    Returns the exit status of the run, and the verdict: None if the job broke off. Help is printed
    if asked for, with a good verdict. To start one process, this one becomes the job: no return.
    """
    catalog = Catalog()
    command_line = parse(sys.argv[2:] if arguments is None else arguments, catalog, switches)
    if command_line.switch("help"):
        from accel_launch.settings.help_page import show_help

        show_help(catalog, f"accel {name} [options]", about, switches, command_line.mentioned)
        return 0, True
    if command_line.rest:
        raise SettingsError(
            f"{command_line.rest[0]} was given, and accel {name} starts a program of its own; accel launch starts yours."
        )
    path = Path(tempfile.gettempdir()) / f"accel-{name}-{secrets.token_hex(8)}"
    ours = ("--verdict", str(path), "--launcher", str(os.getpid()), *words(command_line))
    try:
        status = run(resolve_line(command_line, catalog), Program("module", job, ours))
        return status, path.read_text(encoding="ascii") == "good" if path.exists() else None
    finally:
        path.unlink(missing_ok=True)
