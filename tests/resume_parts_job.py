"""Runs that go on: on other numbers of processes, with every schedule, far inside a huge set, in a last global batch, by hand.

The functions that stand first are what a rank does; the test compares what they return, or have written down.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from resume_job import begin, die_together
from resume_state_job import Trainer, plain, seeded
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, Dataset

SAMPLES, GLOBAL_BATCH = 40, 8
LEG, STEPS = 3, 14  # micro-batches; a leg ends inside a window
SCHEDULES: dict[str, Any] = {
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "one cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=40),
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, T_max=9),
    "sequence": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2), lr_scheduler.ExponentialLR(optimizer, 0.9)],
        milestones=[2],
    ),
    "plateau": lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=1),
}
SAVED_AT = (4, 5)  # micro-batches: at the end of a window, and inside one


def leg(folder: Path, number: int, last: bool) -> None:
    """Goes on for a few micro-batches, and saves; all but the last are then killed behind one more.

    The first makes the uninterrupted run beforehand.
    """
    begin()
    if number == 0:
        seeded(0)
        note(folder, "whole", trained(of_all_samples(), STEPS))
    seeded(0, drawn=number)  # what goes on is what was saved
    trainer = of_all_samples()
    if number:
        trainer.accelerator.load_state(folder / "saved")
        note(folder, f"loaded-{number}", trainer.parts())
    batches = endless(trainer)
    note(folder, f"leg-{number}", trained(trainer, STEPS - number * LEG if last else LEG, batches))
    if not last:
        trainer.accelerator.save_state(folder / "saved")
        note(folder, f"saved-{number}", trainer.parts())
        trained(trainer, 1, batches)
        die_together()


def draws_behind_two_loads(folder: Path) -> list[list[float]]:
    """What this rank draws from its streams behind each of two loads; in between they were somewhere else."""
    found = []
    for drawn in (1, 2):
        seeded(0, drawn)
        of_all_samples().accelerator.load_state(folder / "saved")
        found.append([random.random(), float(np.random.rand()), torch.rand(()).item()])
    return found


def save_schedules(folder: Path) -> dict[str, list[list[float]]]:
    """The rates of uninterrupted runs; and saves a run of each schedule, at every place."""
    whole = {}
    for name in SCHEDULES:
        whole[name] = rates(of_all_samples(name), STEPS)
        for steps in SAVED_AT:
            trainer = of_all_samples(name)
            rates(trainer, steps)
            trainer.accelerator.save_state(folder / name / str(steps))
    return whole


def load_schedules(folder: Path) -> dict[str, dict[int, list[list[float]]]]:
    """The rates of the rest of each run."""
    found: dict[str, dict[int, list[list[float]]]] = {name: {} for name in SCHEDULES}
    for name in SCHEDULES:
        for steps in SAVED_AT:
            trainer = of_all_samples(name)
            trainer.accelerator.load_state(folder / name / str(steps))
            found[name][steps] = rates(trainer, STEPS - steps)
    return found


def go_on_far_inside(folder: Path, batches: int, shuffle: bool) -> tuple[list[int], list[int], int]:
    """The batch behind so many, the samples that were read for it, and the position then; of a run saved there."""
    first = Trainer(DataLoader(Recorded(), 8, shuffle=shuffle, collate_fn=plain))
    first.loader.load_state_dict({**first.loader.state_dict(), "samples": 8 * batches})
    first.accelerator.save_state(folder / "far")
    dataset = Recorded()
    trainer = Trainer(DataLoader(dataset, 8, shuffle=shuffle, collate_fn=plain))
    trainer.accelerator.load_state(folder / "far")
    ids = trainer.step(next(iter(trainer.loader)))[0]
    return ids, dataset.reads, trainer.loader.state_dict()["samples"]


def save_near_the_end(folder: Path) -> None:
    """Saves a run behind 28 of 29 samples: on more processes, that is inside the last global batch."""
    trainer = of_29()
    trained(trainer, 7)
    trainer.accelerator.save_state(folder / "near")


def go_on_near_the_end(folder: Path) -> list[list[int]]:
    """What metrics see of the rest of the epoch, and of the next one."""
    trainer = of_29()
    trainer.accelerator.load_state(folder / "near")
    return [[sample for _, gathered, *_ in trainer.epoch() for sample in gathered] for _ in range(2)]


def save_in_the_second_epoch(folder: Path, steps: int) -> list[Any]:
    """Saves a run behind some steps of its second epoch; what it makes of the rest of that, and of the third one."""
    seeded(7)
    trainer = of_29()
    trainer.epoch()
    batches = iter(trainer.loader)
    trained(trainer, steps, batches)
    trainer.accelerator.save_state(folder / "second")
    return [trainer.epoch(batches), trainer.epoch()]


def skip_by_hand(folder: Path, steps: int) -> list[Any]:
    """The same of a run that loads this state, and leaves out the steps by hand."""
    seeded(7, drawn=1)
    trainer = of_29()
    trainer.accelerator.load_state(folder / "second")
    return [trainer.epoch(trainer.accelerator.skip_first_batches(trainer.loader, steps)), trainer.epoch()]


class Recorded(Dataset[int]):
    """A huge dataset that says which samples were read."""

    def __init__(self) -> None:
        self.reads: list[int] = []

    def __len__(self) -> int:
        return 10**9

    def __getitem__(self, index: int) -> int:
        self.reads.append(index)
        return index


def of_all_samples(schedule: str = "one cycle") -> Trainer:
    """Global batches of one size on any number of processes. Without dropout, which differs by rank."""
    loader = DataLoader(range(SAMPLES), GLOBAL_BATCH, shuffle=True, collate_fn=plain)  # type: ignore[arg-type]
    return Trainer(loader, SCHEDULES[schedule], dropout=0.0, split_batches=True)


def of_29() -> Trainer:
    """Batches of four on each rank, with dropout."""
    return Trainer(DataLoader(range(29), 4, shuffle=True, collate_fn=plain))  # type: ignore[arg-type]


def endless(trainer: Trainer) -> Iterator[Any]:
    """Epoch after epoch."""
    while True:
        yield from trainer.loader


def trained(trainer: Trainer, steps: int, batches: Iterator[Any] | None = None) -> list[list[Any]]:
    """What a trainer makes of so many batches."""
    return trainer.epoch(islice(endless(trainer) if batches is None else batches, steps))


def rates(trainer: Trainer, steps: int) -> list[list[float]]:
    """The learning rates of the steps, and the last one that the schedule says."""
    last = lambda: trainer.schedule.get_last_lr()[0]
    batches = islice(endless(trainer), steps)
    return [[trainer.step(batch)[3], last()] for batch in batches]


def note(folder: Path, title: str, seen: Any) -> None:
    """Writes something down on the main process."""
    if os.environ["RANK"] == "0":
        (folder / f"{title}.json").write_text(json.dumps(seen))
