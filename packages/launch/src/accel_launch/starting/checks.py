"""The conditions that options have to fulfil before anything is started."""

from __future__ import annotations

import shutil
import string
from dataclasses import fields
from typing import TYPE_CHECKING, NamedTuple

from accel_launch.options import LaunchOptions
from accel_launch.starting.errors import LaunchError
from accel_launch.starting.streams import check_ranks, read_streams

if TYPE_CHECKING:
    from accel_launch.starting.devices import Accelerators


class Range(NamedTuple):
    """The values that an option may have, both ends included; `what` says what it counts."""

    low: float
    high: float
    what: str


_ANY = float("inf")
RANGES = {
    "num_processes": Range(1, _ANY, "processes of the whole run"),
    "num_machines": Range(1, _ANY, "machines"),
    "machine_rank": Range(0, _ANY, "machines, from 0"),
    "main_process_port": Range(0, 65535, "ports; 0 is a free one"),
    "num_cpu_threads_per_process": Range(1, _ANY, "threads"),
    "max_restarts": Range(0, _ANY, "restarts"),
    "monitor_interval": Range(0.001, 3600, "seconds between two looks"),
    "shutdown_timeout": Range(0, _ANY, "seconds"),
    "min_machines": Range(1, _ANY, "machines"),
}
_TEMPLATE_NAMES = {"rank", "local_rank", "role_name"}


def given(launch: LaunchOptions) -> list[str]:
    """The names of the options that are not at their defaults."""
    return [each.name for each in fields(LaunchOptions) if getattr(launch, each.name) != each.default]


def check_values(launch: LaunchOptions) -> None:
    """Raises `LaunchError` for values that no run can have."""
    for name, allowed in RANGES.items():
        value = getattr(launch, name)
        if value is not None and not allowed.low <= value <= allowed.high:
            end = "" if allowed.high == _ANY else f" to {allowed.high:g}"
            above = " or more" if allowed.high == _ANY else ""
            raise LaunchError(f"{name}={value} was given. It counts {allowed.what}: give {allowed.low:g}{end}{above}.")
    if launch.meeting_timeout.total_seconds() <= 0:
        raise LaunchError(f"meeting_timeout={launch.meeting_timeout} was given. Give a time above 0, such as 15m.")
    if (launch.min_machines or 1) > launch.num_machines:
        raise LaunchError(
            f"min_machines={launch.min_machines} was given beside num_machines={launch.num_machines}, the most that take part. "
            f"Give {launch.num_machines} or fewer."
        )
    if launch.machine_rank is not None and launch.machine_rank >= launch.num_machines:
        raise LaunchError(
            f"machine_rank={launch.machine_rank} was given, and there are num_machines={launch.num_machines}, with ranks from 0 to "
            f"{launch.num_machines - 1}. Give one of these; or the right --num-machines, the same on every machine."
        )


def check_output(launch: LaunchOptions, processes: int) -> None:
    """Raises `LaunchError` for options of output that do not fit together, or not to the processes of this machine."""
    read_streams("redirects", launch.redirects, processes)
    read_streams("tee", launch.tee, processes)
    if launch.local_ranks_filter is not None:
        if not launch.local_ranks_filter:
            raise LaunchError(
                "local_ranks_filter names no process, so nothing would be shown. Name local ranks, as in 0,1; or leave it out."
            )
        check_ranks("local_ranks_filter", launch.local_ranks_filter, processes)
    template = launch.log_line_prefix_template
    if template is None:
        return
    names = {name or braced for _, name, braced, _ in string.Template.pattern.findall(template) if name or braced}
    if names - _TEMPLATE_NAMES:
        raise LaunchError(
            f"log_line_prefix_template={template!r} has {', '.join(f'${{{name}}}' for name in sorted(names - _TEMPLATE_NAMES))}. "
            f"It may have {', '.join(f'${{{name}}}' for name in sorted(_TEMPLATE_NAMES))}."
        )
    if launch.tee == "0":
        raise LaunchError(
            f"log_line_prefix_template={template!r} was given, and lines get a prefix only where they go to the console and to "
            f"files. Add --tee 3; or leave it out."
        )


def check_numa(launch: LaunchOptions, accelerators: Accelerators) -> None:
    """Raises `LaunchError` if processes are to be bound to cores, and torch cannot do that here."""
    if launch.numa_binding is None:
        return
    asked = f"numa_binding={launch.numa_binding} was given"
    if accelerators.kind != "cuda":
        raise LaunchError(
            f"{asked}, which binds a process to the cores near its accelerator; torch does that for the type cuda, and found "
            f"{accelerators}. Leave it out; num_cpu_threads_per_process says how many cores a process uses."
        )
    if shutil.which("numactl") is None:
        raise LaunchError(
            f"{asked}, which needs the program numactl, and that is not on the PATH. Install it, or leave it out."
        )
