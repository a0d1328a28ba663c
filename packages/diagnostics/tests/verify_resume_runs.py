"""The runs of `accel verify-resume` in ranks that are forked, without a launcher: a second each, and killed as really."""

from __future__ import annotations

import sys
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
    status, output = 0, ""
    try:
        run_ranks(observe_in_rank, processes, *observed)
    except RanksFailed as error:
        status, output = 1, str(error)
    log.write_text(output, encoding="utf-8")
    return status
