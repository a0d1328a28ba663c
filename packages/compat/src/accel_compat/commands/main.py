"""The console scripts `accelerate`, `accelerate-launch` and so on."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from importlib import import_module, metadata
from typing import Any, NamedTuple

from accel_launch import report_errors


class Command(NamedTuple):
    """One command: the module that has it, and the names of its parser and of what it does there."""

    module: str
    parser: str
    run: str = ""  # empty: the parser sets `func`
    about: str = ""


COMMANDS = {
    "launch": Command("launch", "launch_command_parser", "start", "start a script in as many processes as asked for"),
    "config": Command("config", "get_config_parser", "", "write the configuration file"),
    "env": Command("others", "env_command_parser", "env_command", "print facts for a bug report"),
    "test": Command("others", "test_command_parser", "test_command", "check this set-up for real"),
    "estimate-memory": Command("others", "estimate_command_parser", "estimate_command", "say what a model takes"),
    "merge-weights": Command("others", "merge_command_parser", "merge_command", "write weights as safetensors"),
    "to-fsdp2": Command("fsdp2", "to_fsdp2_command_parser", "to_fsdp2_command", "convert a configuration file"),
}
_MISSING = {
    "tpu-config": "pods of TPUs are not set up here. Type the commands on each machine, by `gcloud compute tpus tpu-vm ssh`",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """`accelerate COMMAND …`: runs a command, and returns the exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    return report_errors("accelerate", lambda: _run(given))


def _run(given: Sequence[str]) -> int:
    name, rest = given[0] if given else "", given[1:]
    if name in {"", "-h", "--help"}:
        print("usage: accelerate COMMAND ...\n\nThe commands of Accelerate, done by those of `accel`.\n")  # noqa: T201
        print("\n".join(f"  {each:<17}{command.about}" for each, command in COMMANDS.items()))  # noqa: T201
        return 0 if name else 2
    if name == "--version":
        print(f"accelerate {metadata.version('accelerate')} (accel-compat {metadata.version('accel-compat')})")  # noqa: T201
        return 0
    if name in _MISSING:
        raise ValueError(f"there is no accelerate {name} here: {_MISSING[name]}.")
    if name not in COMMANDS:
        raise ValueError(f"there is no command {name!r}. There are {', '.join(COMMANDS)}.")
    return _do(name, rest)


def _do(name: str, rest: Sequence[str]) -> int:
    command = COMMANDS[name]
    module = import_module(f"accel_compat.commands.{command.module}")
    arguments: argparse.Namespace = getattr(module, command.parser)().parse_args(rest)
    run: Callable[[Any], int | None] = getattr(module, command.run) if command.run else arguments.func
    return int(run(arguments) or 0)


def _script(name: str) -> Callable[[], int]:
    return lambda: report_errors(f"accelerate-{name}", lambda: _do(name, sys.argv[1:]))


launch, config = _script("launch"), _script("config")
estimate_memory, merge_weights = _script("estimate-memory"), _script("merge-weights")
