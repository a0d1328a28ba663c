"""Runs examples/quickstart.py on a rank, made small, with an audit of what it reads, and perhaps with a death on the way.

Each sequence begins with its number, so whoever sees the tokens knows what was read. The main process writes a line for each
micro-batch into a journal of its own life, so that what is left behind by a killed process can be compared.
"""

from __future__ import annotations

import importlib.util
import json
import os
import random
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from resume_job import shoot

from accel_core import Accelerator, gather_object

SCRIPT = Path(__file__).parents[1] / "examples" / "quickstart.py"
SEQUENCES = 52  # 13 micro-batches of 4 are an epoch: windows of two do not divide it, and no batch has to be filled up
STEPS, EVERY = 45, 3
SMALL = {"LENGTH": 8, "WIDTH": 16, "HEADS": 2, "LAYERS": 1, "VALIDATED": 9}


@dataclass(frozen=True)
class Life:
    """One launch.

    Args:
        number: of this life; also the seed of the moment of its death.
        dies: whether it is killed, inside the steps that it makes.
    """

    number: int
    dies: bool


def live(folder: Path, life: Life) -> None:
    """Runs the quickstart, from its newest checkpoint if there is one, until it ends or is killed."""
    quickstart = small_quickstart()
    audit = Audit(folder / f"life-{life.number}.jsonl", death=Death(life.number) if life.dies else None)
    audit.watch(quickstart)
    arguments = ["--seconds", "inf", "--steps", str(STEPS), "--every", str(EVERY), "--out", str(folder / "out")]
    resume = ["--resume"] if list(folder.glob("run/checkpoints/*/manifest.json")) else []
    with called_with(*arguments, "--save", str(folder / "run"), *resume):
        quickstart.main()


def small_quickstart() -> Any:
    """The script as a module of its own, with a small model and a small dataset."""
    spec = importlib.util.spec_from_file_location("quickstart", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    vars(module).update(SMALL)
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(0, 256, (SEQUENCES, SMALL["LENGTH"] + 1), generator=generator)
    rows[:, 0] = torch.arange(SEQUENCES)
    module.sequences = lambda _: rows
    return module


@contextmanager
def called_with(*arguments: str) -> Iterator[None]:
    """The command line of a script."""
    before, sys.argv = sys.argv, [str(SCRIPT), *arguments]
    try:
        yield
    finally:
        sys.argv = before


class Death:
    """SIGKILL for all ranks, at a random moment inside some of the next micro-batches, or between them.

    Args:
        seed: of the moment.
    """

    def __init__(self, seed: int) -> None:
        draw = random.Random(seed)
        self._last = draw.randint(3 * EVERY, 6 * EVERY)
        self._later = 4 * draw.random()
        self._processes: list[int] = []
        self._begun = 0.0
        self._made = 0

    def comes_nearer(self) -> None:
        """Counts a micro-batch of this life, and sets the clock behind the last one. A collective at the first."""
        if not self._made:
            self._processes, self._begun = gather_object([os.getpid()]), time.perf_counter()
        self._made += 1
        if self._made == self._last and os.getpid() == self._processes[0]:
            each = (time.perf_counter() - self._begun) / (self._made - 1)
            threading.Timer(self._later * each, shoot, (self._processes,)).start()


class Audit:
    """Writes down which sequences are trained on, under the number of the step.

    Args:
        journal: the file.
        death: of the ranks; None: they live.
    """

    def __init__(self, journal: Path, death: Death | None) -> None:
        self._journal = journal
        self._death = death
        self._progress: Any = None
        self._accelerator: Any = None

    def watch(self, quickstart: ModuleType) -> None:
        """Gives the script, in the place of its own, parts that report here; global batches are those of one process."""
        audit, losses, own_progress = self, quickstart.losses, quickstart.Progress

        class Watched(Accelerator):
            def __init__(self, **options: Any) -> None:
                super().__init__(split_batches=True, **options)
                audit._accelerator = self

        class Progress(own_progress):  # type: ignore[misc, valid-type]
            def __init__(self, options: Any) -> None:
                super().__init__(options)
                audit._progress = self

        def watched_losses(model: Any, tokens: torch.Tensor) -> Any:
            if model.training:
                audit._note(tokens)
            return losses(model, tokens)

        vars(quickstart).update(Accelerator=Watched, Progress=Progress, losses=watched_losses)

    def _note(self, tokens: torch.Tensor) -> None:
        ids = self._accelerator.gather(tokens[:, 0]).tolist()
        step = len(self._progress.train)
        if self._accelerator.is_main_process:
            with self._journal.open("a") as file:
                print(json.dumps([step, ids]), file=file, flush=True)
        if self._death is not None:
            self._death.comes_nearer()
