"""Runs the user's script on one rank, unchanged, with a recorder around its first Accelerator.

    python -m accel_diagnostics.resume.observed JOURNAL KILL_AT FINAL KIND TARGET [arguments]

KIND is "script" or "module"; FINAL is where the state at the end is saved, "-" for nowhere.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path
from typing import Any

from accel_core import Accelerator
from accel_core.api.diagnostics import run_and_feed
from accel_diagnostics.resume.journal import Writer
from accel_diagnostics.resume.recorder import Recorder


def main() -> None:
    """Runs it, and writes down the end of a script that does not call `end_training`."""
    journal, kill_at, final, kind, target, *arguments = sys.argv[1:]
    finish = observe(Path(journal), int(kill_at), None if final == "-" else Path(final))
    sys.argv = [target, *arguments]
    try:
        if kind == "module":
            sys.path[0] = os.getcwd()
            runpy.run_module(target, run_name="__main__", alter_sys=True)
        else:
            sys.path[0] = str(Path(target).resolve().parent)
            runpy.run_path(target, run_name="__main__")
    except SystemExit as ended:
        if ended.code not in (None, 0):
            raise
    finish()


def observe(folder: Path, kill_at: int, final: Path | None) -> Any:
    """Has the first Accelerator of this process recorded; returns what is to be called at the end."""
    build, end = Accelerator.__init__, Accelerator.end_training
    recorders: list[Recorder] = []
    journal: list[Writer] = []

    def init(self: Accelerator, *arguments: Any, **options: Any) -> None:
        build(self, *arguments, **options)
        run, feed = run_and_feed(self)
        if not recorders:
            journal.append(Writer(folder, run.world.rank))
        journal[0].write(
            "start", world=run.world.size, strategy=type(run.strategy).__name__, device=str(run.world.device)
        )
        if not recorders:
            recorders.append(Recorder(run, feed, journal[0], kill_at))
            watched.append(self)

    def end_training(self: Accelerator, **options: Any) -> None:
        if self in watched:
            finish()
        end(self, **options)

    def finish() -> None:
        for recorder in recorders:
            recorder.finish(final)

    watched: list[Accelerator] = []
    Accelerator.__init__, Accelerator.end_training = init, end_training  # type: ignore[method-assign]
    return finish


if __name__ == "__main__":
    main()
