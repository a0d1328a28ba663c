"""The runs of `accel verify-resume` in ranks that are forked, without a launcher: a second each, and killed as really."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from pathlib import Path

from accel_diagnostics.resume import observed
from accel_diagnostics.resume.launching import Script
from accel_testing import RanksFailed, run_ranks


def observe_in_rank(*arguments: str) -> None:
    """What a rank runs under the launcher."""
    sys.argv = ["observed", *arguments]
    sys.path.insert(0, "")
    observed.main()


def execute_in_ranks(script: Script, processes: int, observed: list[str], log: Path, files: Path) -> int:
    """Stands for `launching.execute`."""
    with log.open("w", encoding="utf-8") as file, redirect_stdout(file):  # to which the ranks' output is passed on
        try:
            run_ranks(observe_in_rank, processes, *observed)
        except RanksFailed as error:
            file.write(str(error))
            return 1
    return 0
