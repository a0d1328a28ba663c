"""The options that a job of `accel test` or `accel doctor` gets, and the verdict that it leaves."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from accel_core.api.launcher import read_place


def options() -> argparse.ArgumentParser:
    """A parser of `--verdict`, the file into which it is written, for the process `--launcher`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--verdict", type=Path, required=True)
    parser.add_argument("--launcher", type=int, required=True)
    return parser


def leave(given: argparse.Namespace, *, is_good: bool) -> int:
    """Hands the verdict over, and returns the exit status of this rank.

    A rank that has become the command answers by its status. Otherwise a launcher still runs, which
    would take another one than 0 for a rank that broke down.
    """
    if given.launcher == os.getpid():
        return int(not is_good)
    if read_place(os.environ).local_rank == 0:
        given.verdict.write_text("good" if is_good else "bad", encoding="ascii")
    return 0
