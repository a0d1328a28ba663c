"""`accelerate launch`: its options become those of `accel launch`, and variables of the processes."""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from accel_compat.commands.merging import STRATEGIES, merge
from accel_compat.commands.options import OPTIONS, launch_command_parser
from accel_compat.commands.variables import variables
from accel_launch import launch

__all__ = ["launch_command", "launch_command_parser", "main", "merge", "start"]

_NO_OPTIONS = Path(__file__).with_name("no_options.yaml")
"""A file that says nothing, so that `accel launch` does not read the user's."""

_SAME = ("num_processes", "num_cpu_threads_per_process", "num_machines", "machine_rank", "main_process_ip")
_IF_GIVEN = ("main_process_port", "max_restarts", "monitor_interval", "tee", "log_dir", "role")


def main(arguments: list[str] | None = None) -> int:
    """Reads a command line, and starts what it says; returns the exit status."""
    return start(launch_command_parser().parse_args(arguments))


def launch_command(args: argparse.Namespace) -> None:
    """Starts what parsed options say, and stays until it has ended.

    Raises `CalledProcessError` if it fails; with --quiet, `SystemExit`.
    """
    status = start(args, stays=True)
    if status and getattr(args, "quiet", False):
        raise SystemExit(status)
    if status:
        raise subprocess.CalledProcessError(status, [args.training_script, *args.training_script_args])


def start(arguments: argparse.Namespace, *, stays: bool = False) -> int:
    """Starts what parsed options and the configuration file say; returns the exit status."""
    merged, file, from_file = merge(arguments)
    fields = [*getattr(file, "deepspeed_config", {}), *(["mixed_precision"] if from_file else [])]
    words = [*_options(merged), *_program(merged)]
    _warn_of_ours(merged)
    return launch(words, variables(merged, ",".join(fields)), stays=stays)


def _warn_of_ours(arguments: argparse.Namespace) -> None:
    """Says so where a strategy was chosen for a script that imports accel_core, which does not read it."""
    chosen = [f"--{flag}" for flag in STRATEGIES if getattr(arguments, flag)]
    script = Path(arguments.training_script)
    if not chosen or script.suffix != ".py" or not script.is_file():
        return
    text = script.read_text(encoding="utf-8", errors="replace")
    if re.search(r"^\s*(from|import) accel_core\b", text, re.MULTILINE) and "accelerate" not in text:
        what = f"{script} imports accel_core, which reads nothing of {chosen[0]}: it is not sharded by it."
        print(f"accelerate: {what} Type `accel config import`, and `accel launch`.", file=sys.stderr)  # noqa: T201


def _options(arguments: argparse.Namespace) -> Iterator[str]:
    yield f"--config-file={_NO_OPTIONS}"
    if arguments.use_cpu:
        yield "--cpu"
    for name in _SAME:
        value = getattr(arguments, name, None)
        if value is not None and (name, value) != ("num_machines", 1) and _is_numbered(arguments, name):
            yield f"--{name.replace('_', '-')}={value}"
    for name in _IF_GIVEN:
        value = getattr(arguments, name, None)
        if value not in {None, OPTIONS[name].default}:
            yield f"--{name.replace('_', '-')}={value}"
    if arguments.gpu_ids not in {None, "all"} and not arguments.use_cpu:
        yield f"--device-ids={arguments.gpu_ids}"
    if arguments.enable_cpu_affinity and not arguments.use_cpu:
        yield "--numa-binding=node"
    if arguments.debug:
        yield "--debug"
    if arguments.rdzv_backend not in {None, "", "static"} and arguments.num_machines > 1:
        yield f"--rdzv-backend={arguments.rdzv_backend}"
    if arguments.rdzv_conf:
        pairs = (pair.partition("=") for pair in str(arguments.rdzv_conf).split(","))
        yield f"--rdzv-conf={json.dumps({name.strip(): value.strip() for name, _, value in pairs})}"


def _is_numbered(arguments: argparse.Namespace, name: str) -> bool:
    """Whether an option says something: what numbers machines and where they meet does for several only."""
    if name == "machine_rank":
        return bool(arguments.num_machines > 1 and arguments.rdzv_backend in {None, "", "static"})
    return bool(name != "main_process_ip" or arguments.num_machines > 1)


def _program(arguments: argparse.Namespace) -> Iterator[str]:
    if arguments.module:
        yield "--module"
    if arguments.no_python:
        yield "--no-python"
    yield from (arguments.training_script, *arguments.training_script_args)
