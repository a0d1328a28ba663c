"""The conditions that options have to fulfil before a start, and the outputs of each process."""

from __future__ import annotations

import re
from dataclasses import fields

from accel_launch.errors import LaunchError
from accel_launch.options import LaunchOptions

_ANY = float("inf")
RANGES = {
    "num_processes": (1, _ANY, "processes of the whole run"),
    "num_machines": (1, _ANY, "machines"),
    "machine_rank": (0, _ANY, "machines, from 0"),
    "main_process_port": (0, 65535, "ports; 0 is a free one"),
    "num_cpu_threads_per_process": (1, _ANY, "threads"),
    "max_restarts": (0, _ANY, "restarts"),
    "monitor_interval": (0.001, 3600, "seconds between two looks"),
    "shutdown_timeout": (0, _ANY, "seconds"),
    "min_machines": (1, _ANY, "machines"),
}
"""Option → its least and largest value, and what it counts."""


def given(launch: LaunchOptions) -> list[str]:
    """The names of the options that are not at their defaults."""
    return [each.name for each in fields(LaunchOptions) if getattr(launch, each.name) != each.default]


def check_values(launch: LaunchOptions) -> None:
    """Raises `LaunchError` for values that no run can have."""
    for name, (low, high, what) in RANGES.items():
        value = getattr(launch, name)
        if value is not None and not low <= value <= high:
            end = " or more" if high == _ANY else f" to {high:g}"
            raise LaunchError(f"{name}={value} was given. It counts {what}: give {low:g}{end}.")
    machines = launch.num_machines
    if (launch.min_machines or 1) > machines:
        raise LaunchError(
            f"min_machines={launch.min_machines} was given beside num_machines={machines}. Give no more than these."
        )
    if launch.machine_rank is not None and launch.machine_rank >= machines:
        raise LaunchError(
            f"machine_rank={launch.machine_rank} was given, and there are num_machines={machines}, with ranks from 0 to "
            f"{machines - 1}. Give one of these; or the right --num-machines, the same on every machine."
        )


def check_output(launch: LaunchOptions, processes: int) -> None:
    """Raises `LaunchError` for unreadable options of output, or if they show nothing."""
    read_streams("redirects", launch.redirects, processes)
    read_streams("tee", launch.tee, processes)
    if launch.local_ranks_filter is not None and not set(launch.local_ranks_filter) & set(range(processes)):
        raise LaunchError(
            f"local_ranks_filter={launch.local_ranks_filter} names no process of this machine, so nothing would be "
            f"shown. Give local ranks from 0 to {processes - 1}."
        )


def read_streams(option: str, text: str, processes: int) -> dict[int, int]:
    """Streams from "3", or "0:3,1:2" by local rank: rank → 0 none, 1 output, 2 errors, 3 both."""
    if re.fullmatch(r"[0-3]", text):
        return dict.fromkeys(range(processes), int(text))
    if not re.fullmatch(r"\d+:[0-3](,\d+:[0-3])*", text):  # torch's own reading of it knows local ranks 0 to 9 only
        raise LaunchError(
            f"{option}={text!r} was given. Type 0 (none), 1 (standard output), 2 (errors) or 3 (both) for all processes "
            "of this machine, or for single ones their local ranks, as in 0:3,1:2."
        )
    streams = {int(rank): int(value) for rank, value in (each.split(":") for each in text.split(","))}
    return {rank: streams.get(rank, 0) for rank in range(processes)}
