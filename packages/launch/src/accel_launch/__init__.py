"""Starting and configuring: the `accel` command, and launchers for notebooks and for debugging."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from accel_launch.errors import LaunchError, RankFailedError
    from accel_launch.importing.foreign import Carried, Imported, Left
    from accel_launch.importing.places import is_of_peer, peer_paths
    from accel_launch.main import report_errors
    from accel_launch.notebook.launchers import debug_launcher, notebook_launcher

__all__ = [
    "Carried", "Imported", "LaunchError", "Left", "RankFailedError", "ask_for_config", "debug_launcher", "is_of_peer", "launch",
    "notebook_launcher", "peer_paths", "report_errors", "run_command",
]  # fmt: skip

__version__ = "0.1.0"

_MODULES = {
    "Carried": "importing.foreign",
    "Imported": "importing.foreign",
    "Left": "importing.foreign",
    "LaunchError": "errors",
    "RankFailedError": "errors",
    "debug_launcher": "notebook.launchers",
    "is_of_peer": "importing.places",
    "notebook_launcher": "notebook.launchers",
    "peer_paths": "importing.places",
    "report_errors": "main",
}


def run_command(arguments: Sequence[str]) -> int:
    """Runs a command of `accel`, such as ["env", "--json"]; returns the exit status.

    Raises what the command raises: `ValueError` and the like, whose messages speak to the user.
    """
    from accel_launch.main import run

    return run(arguments)


def launch(arguments: Sequence[str], variables: Mapping[str, str], *, stays: bool = False) -> int:
    """Runs `accel launch` with these arguments; returns the exit status, or raises as `run_command`.

    `variables` are added to the environment of the processes; as options they are not read. Where
    one process is to be started on one machine, this process becomes it, unless it `stays`.
    """
    from accel_launch.commands.launch import main

    return main(arguments, variables, stays=stays)


def ask_for_config(path: Path) -> int:
    """Asks the questions of `accel config`, and writes the answers to a file of ours.

    Returns 0 if it was written. What a file at `path` says already is shown as answers.
    """
    from accel_launch.questionnaire import ask
    from accel_launch.settings.catalog import Catalog

    return ask(Catalog(), path)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
