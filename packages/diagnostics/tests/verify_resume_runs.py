"""The runs of `accel verify-resume` in ranks that are forked, without a launcher: a second each, and killed as really."""

from __future__ import annotations

import sys
from pathlib import Path

from accel_diagnostics.resume import observed
from accel_diagnostics.resume.journal import read
from accel_diagnostics.resume.launching import FOLDER, Run, Script
from accel_diagnostics.resume.recorder import NEVER
from accel_testing import RanksFailed, run_ranks


def observe_in_rank(*arguments: str) -> None:
    """What a rank runs under the launcher."""
    sys.argv = ["observed", *arguments]
    sys.path.insert(0, "")
    observed.main()


def start_in_ranks(
    script: Script,
    root: Path,
    name: str,
    processes: int,
    *,
    kill_at: int = NEVER,
    resumes: Path | None = None,
    saves_end: bool = False,
) -> Run:
    """Stands for `launching.start`."""
    files = root / name / "files" if resumes is None else resumes
    files.mkdir(parents=True, exist_ok=True)
    journal, log = root / name / "journal", root / name / "output.txt"
    journal.mkdir(parents=True)
    arguments = [*script.arguments, *(script.resuming if resumes else ())]
    given = [each.replace(FOLDER, str(files)) for each in arguments]
    final = str(root / name / "end") if saves_end else "-"
    status, output = 0, ""
    try:
        run_ranks(observe_in_rank, processes, str(journal), str(kill_at), final, "script", script.target, *given)
    except RanksFailed as error:
        status, output = 1, str(error)
    log.write_text(output, encoding="utf-8")
    return Run(status, processes, read(journal), log, files)
