"""Starts a run of the user's script by `accel launch`, with an observer in every rank."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from accel_diagnostics.resume.journal import RankJournal, read
from accel_diagnostics.resume.recorder import NEVER

FOLDER = "{folder}"
"""Stands in arguments of the script for the folder of a run."""

_TAIL = 15  # lines of output that a message shows


@dataclass(frozen=True)
class Script:
    """The user's script, and how it is started; `resuming` are arguments of the resumed run alone."""

    kind: Literal["script", "module"]
    target: str
    arguments: tuple[str, ...] = ()
    resuming: tuple[str, ...] = ()
    launching: tuple[str, ...] = ()
    own_directory: bool = False


@dataclass(frozen=True)
class Run:
    """A run that has ended: its status, its journals by rank, and where its output and files are."""

    status: int
    processes: int
    journals: list[RankJournal]
    log: Path
    files: Path

    @property
    def steps(self) -> int:
        """How many windows every rank closed."""
        return min((each.closed() for each in self.journals), default=0)

    @property
    def saves(self) -> list[int]:
        """After how many steps it saved, each once; only `accelerator.save_state()` counts."""
        return sorted({step for step, _ in self.journals[0].saves})

    @property
    def left_files(self) -> bool:
        """Whether it saved anything, in whatever format."""
        return bool(self.saves) or any(each.is_file() for each in self.files.rglob("*"))

    def tail(self) -> str:
        """The last lines of the output."""
        lines = self.log.read_text(encoding="utf-8", errors="replace").rstrip().splitlines()
        return "\n".join(f"  | {line}" for line in lines[-_TAIL:]) or "  | (no output)"


def start(
    script: Script,
    root: Path,
    name: str,
    processes: int,
    *,
    kill_at: int = NEVER,
    resumes: Path | None = None,
    saves_end: bool = False,
) -> Run:
    """Runs the script to its end. `resumes`: the files of the run that is to go on."""
    files = root / name / "files" if resumes is None else resumes
    files.mkdir(parents=True, exist_ok=True)
    journal, log, final = (root / name / part for part in ("journal", "output.txt", "end"))
    journal.mkdir(parents=True)
    arguments = [each.replace(FOLDER, str(files)) for each in script.arguments]
    arguments += [] if resumes is None else [each.replace(FOLDER, str(files)) for each in script.resuming]
    target = script.target if script.kind == "module" else str(Path(script.target).resolve())
    observed = [str(journal), str(kill_at), str(final) if saves_end else "-", script.kind, target, *arguments]
    return Run(execute(script, processes, observed, log, files), processes, read(journal), log, files)


def execute(script: Script, processes: int, observed: list[str], log: Path, files: Path) -> int:
    """Launches the ranks, each with these arguments of `observed`, and returns the exit status."""
    launch = ["launch", "--num-processes", str(processes), *script.launching]
    command = [sys.executable, "-m", "accel_launch", *launch, "-m", "accel_diagnostics.resume.observed", *observed]
    folder = files if script.own_directory else None
    with log.open("wb") as output:
        ran = subprocess.run(
            command, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, cwd=folder, check=False
        )
    return ran.returncode
