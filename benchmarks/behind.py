"""P9: how long training stands still for a checkpoint that is written in the background. Run by `run.py`."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import peak
from states import BEHIND, Run, settle
from worker import alternate, arguments, finish, join


class Blocked:
    """Saves in the background, each time into a new folder."""

    def __init__(self, name: str, size: int, place: Path) -> None:
        self.run = Run(size)
        self.way = BEHIND[name](self.run)
        self.folders: Iterator[Path] = (place / f"{name}-{number}" for number in count())
        self.first = self.save()["blocked"]  # it makes the memory that later ones use again
        self.memory = 1.0 if name == "plain" else peak.of_background(name, size)

    def save(self) -> dict[str, float]:
        """Seconds until the call returns, what the next two steps of the optimizer take, and until all is on the disk."""
        folder = next(self.folders)
        before = time.perf_counter()
        wait = self.way.begin(folder)
        returned = time.perf_counter()
        self.run.step()
        stepped = time.perf_counter()
        wait()
        ended = time.perf_counter()
        self.run.step()
        usual = time.perf_counter() - ended
        if folder.exists():
            settle(folder)
            shutil.rmtree(folder)
        return {"blocked": returned - before, "through": stepped - before - usual, "written": ended - before}

    def __call__(self) -> dict[str, float]:
        return {**self.save(), "first": self.first, "memory": self.memory}


def main() -> None:
    options = arguments()
    rank, world = join()
    names = ["plain", "dcp", *(["eager", "lazy"] if "accel" in options.libraries else [])]
    with tempfile.TemporaryDirectory() as place:
        turns: dict[str, Callable[[], dict[str, float]]] = {
            name: Blocked(name, options.size, Path(place)) for name in names
        }
        rounds = alternate(turns, options.rounds, world)
    finish(options.out, rank, world, [_ours(measured) for measured in rounds])


def _ours(measured: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    """Eager and lazy as figures of one library; what is compared with both stands under both names."""
    if "eager" not in measured:
        return measured
    eager, lazy = measured.pop("eager"), measured.pop("lazy")
    both = {f"lazy_{figure}": value for figure, value in lazy.items()}
    doubled = {
        name: figures | {f"lazy_{figure}": value for figure, value in figures.items()}
        for name, figures in measured.items()
    }
    return doubled | {"accel": eager | both}


if __name__ == "__main__":
    main()
