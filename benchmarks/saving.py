"""P8: saving the state of a run durably, and loading it into a run that is there. Run by `run.py`."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path

import peak
from states import WAYS, Run, settle
from worker import alternate, arguments, finish, join


def checkpointing(name: str, size: int, place: Path) -> Callable[[], dict[str, float]]:
    """One library: saves into a new folder, loads from it into the same run, and takes a step of the optimizer."""
    run = Run(size)
    way = WAYS[name](run)
    memory = peak.of_checkpoints(name, size)
    folders = (place / f"{name}-{number}" for number in count())

    def turn() -> dict[str, float]:
        folder = next(folders)
        saved = _seconds(lambda: way.save(folder))
        settle(folder)
        sums = run.sums()
        run.forget()
        loaded = _seconds(lambda: way.load(folder))
        stepped = _seconds(run.step)
        again = _seconds(run.step)
        run.forget()
        way.load(folder)
        if run.sums() != sums:
            raise SystemExit(f"What {name} has loaded is not what it has saved.")
        shutil.rmtree(folder)
        return {"save": saved, "load": loaded, "step": loaded + stepped, "later": again, **memory}

    return turn


def _seconds(function: Callable[[], object]) -> float:
    before = time.perf_counter()
    function()
    return time.perf_counter() - before


def main() -> None:
    options = arguments()
    rank, world = join()
    with tempfile.TemporaryDirectory() as place:
        turns = {name: checkpointing(name, options.size, Path(place)) for name in options.libraries if name in WAYS}
        results = alternate(turns, options.rounds, world)
    finish(options.out, rank, world, results)


if __name__ == "__main__":
    main()
