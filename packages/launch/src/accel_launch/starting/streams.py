"""The destinations of the output of each process: the console, files, or both."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from accel_launch.starting.errors import LaunchError

if TYPE_CHECKING:
    from accel_launch.options import LaunchOptions

_STREAMS = {0: "none", 1: "standard output", 2: "errors", 3: "both"}


def read_streams(option: str, text: str, processes: int) -> dict[int, int]:
    """The streams that an option names: local rank → 0 none, 1 standard output, 2 errors, 3 both.

    The text is one number for all, or "0:3,1:2" for single local ranks of `processes` on this machine.
    Raises `LaunchError` for any other text, and for a local rank that is not there.
    """
    if re.fullmatch(r"[0-3]", text):
        return dict.fromkeys(range(processes), int(text))
    if not re.fullmatch(r"\d+:[0-3](,\d+:[0-3])*", text):
        raise LaunchError(
            f"{option}={text!r} was given. Type 0 (none), 1 (standard output), 2 (errors) or 3 (both) for all processes of "
            f"this machine, or for single ones their local ranks, as in 0:3,1:2."
        )
    streams = {int(rank): int(value) for rank, value in (each.split(":") for each in text.split(","))}
    check_ranks(option, list(streams), processes)
    return {rank: streams.get(rank, 0) for rank in range(processes)}


def check_ranks(option: str, ranks: list[int], processes: int) -> None:
    """Raises `LaunchError` if one of these is no local rank of this machine."""
    wrong = [rank for rank in ranks if not 0 <= rank < processes]
    if wrong:
        raise LaunchError(
            f"{option} names the local rank{'s' if len(wrong) > 1 else ''} {', '.join(map(str, wrong))}, and there are {processes} "
            f"processes on this machine. Give local ranks from 0 to {processes - 1}."
        )


def describe(launch: LaunchOptions) -> str:
    """The destination of the output in words, as far as it was given."""
    parts = [
        f"{option} {_STREAMS.get(int(text), text) if text.isdecimal() else text}"
        for option, text in (("to files:", launch.redirects), ("to files and the console:", launch.tee))
        if text != "0"
    ]
    if launch.local_ranks_filter is not None:
        parts.append(f"shown of local ranks {', '.join(map(str, launch.local_ranks_filter))}")
    if launch.log_dir is not None:
        parts.append(f"in {launch.log_dir}")
    return "; ".join(parts) or "to the console"


def writes_files(launch: LaunchOptions) -> bool:
    """Whether files are kept for the user."""
    return launch.log_dir is not None or launch.redirects != "0" or launch.tee != "0"
