"""Trains on one loader after the other on one rank, saves the state of the run, and is killed; then goes on in new processes.

A rank writes down what it reads and the loss of it, one line for each micro-batch, so that what a killed process has left
behind can be compared with what an uninterrupted run gives.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from resume_job import ALIVE, LOADERS, Run, begin, die_together, steps_before
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR, ReduceLROnPlateau

from accel_core import Accelerator

WINDOW = 2
READ_AHEAD = {"stream", "shared stream", "tape", "StatefulDataLoader of a tape"}
READ_AHEAD |= {kind for kind in LOADERS if "dispatched" in kind}
"""Where batches are put together before the loop asks for them, also without workers."""
Batch = tuple[torch.Tensor, torch.Tensor]


ONE_CYCLE = partial(OneCycleLR, max_lr=0.05, total_steps=1000)


def augmented(samples: Sequence[int]) -> Batch:
    """The ids, and inputs (rows, 4) with noise from every stream of this process."""
    ids = torch.tensor(samples)
    inputs = torch.stack([torch.sin(ids * step / 7.0) for step in range(1, 5)], dim=1)
    return ids, inputs + 0.1 * torch.rand(len(samples), 1) + 0.1 * random.random() + 0.1 * float(np.random.rand())


def plain(samples: Sequence[int]) -> Batch:
    """The same without noise."""
    ids = torch.tensor(samples)
    return ids, torch.stack([torch.sin(ids * step / 7.0) for step in range(1, 5)], dim=1)


class Counter:
    """What a user counts in a script of his own."""

    def __init__(self) -> None:
        self.made = 0

    def state_dict(self) -> dict[str, int]:
        return {"made": self.made}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.made = state["made"]


class Centred(nn.Module):
    """Keeps a running mean for evaluation: a buffer that training changes, and otherwise by rank."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return x - self.mean
        self.mean.lerp_(x.detach().mean(dim=0), 0.1)
        return x


class Trainer:
    """A model with dropout, an optimizer, a schedule and a loader, as a user's script has them.

    Args:
        loader: not prepared.
        schedule: from the optimizer to its schedule.
        dropout: of the model.
        options: of the Accelerator.
    """

    def __init__(
        self,
        loader: Any,
        schedule: Callable[[Any], Any] = ONE_CYCLE,
        dropout: float = 0.3,
        **options: Any,
    ) -> None:
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=WINDOW, **options)
        model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(dropout), Centred(8), nn.ReLU(), nn.Linear(8, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        self.counter = Counter()
        self.model, self.optimizer, self.schedule, self.loader = self.accelerator.prepare(
            model, optimizer, schedule(optimizer), loader
        )
        self.accelerator.register_for_checkpointing(self.counter)

    def step(self, batch: Batch) -> list[Any]:
        """Trains on a micro-batch; gives its ids here, on all ranks without filling, the loss here, the rate, the count."""
        ids, inputs = batch
        with self.accelerator.accumulate(self.model):
            loss = (self.model(inputs).squeeze(1) - torch.cos(ids / 3.0)).square().mean()
            self.accelerator.backward(loss)
            self.optimizer.step()
            self.schedule.step(*((1.0,) if isinstance(self.schedule, ReduceLROnPlateau) else ()))
            self.optimizer.zero_grad()
        self.counter.made += 1
        gathered = self.accelerator.gather_for_metrics(ids).tolist()
        rate = self.optimizer.param_groups[0]["lr"]
        return [ids.tolist(), gathered, loss.item(), rate, self.counter.made]

    def epoch(self, batches: Iterable[Batch] | None = None) -> list[list[Any]]:
        """Trains on batches, those of an iteration by default."""
        return [self.step(batch) for batch in (self.loader if batches is None else batches)]

    def parts(self) -> dict[str, Any]:
        """What has to be equal behind a load, on any number of processes."""
        model = self.accelerator.unwrap_model(self.model)
        return {
            "model": {name: value.tolist() for name, value in model.state_dict().items()},
            "optimizer": [
                {name: torch.as_tensor(value).tolist() for name, value in self.optimizer.state[each].items()}
                for each in model.parameters()
            ],
            "groups": [
                {name: value for name, value in group.items() if name != "params"}
                for group in self.optimizer.param_groups
            ],
            "schedule": {name: value for name, value in self.schedule.state_dict().items() if not callable(value)},
        }


def trainer_of(run: Run, batch: int) -> Trainer:
    """The trainer of one kind of loader. Where nothing is read ahead, the inputs are augmented in this process."""
    build, options = LOADERS[run.kind]
    used = {"num_workers": 2, "persistent_workers": run.workers == "persistent"} if run.workers != "none" else {}
    ahead = bool(used) or run.kind in READ_AHEAD
    return Trainer(build(batch, collate_fn=plain if ahead else augmented, **used), **options)


def seeded(seed: int, drawn: int = 0) -> None:
    """Seeds all streams, each rank's otherwise, and has so many numbers drawn, so that they stand elsewhere."""
    mine = seed + int(os.environ["RANK"])
    random.seed(mine)
    np.random.seed(mine % 2**32)
    torch.manual_seed(mine)
    for _ in range(drawn):
        random.random(), np.random.rand(), torch.rand(())


def seed_of(run: Run, index: int) -> int:
    """The seed of a run: its own, or one that no other process has."""
    return index if run.seeded else torch.seed() // 2


def write(folder: Path, title: str, epochs: Sequence[list[list[Any]]]) -> None:
    """Writes down what this rank has made of the epochs."""
    (folder / f"{title}-{os.environ['RANK']}.json").write_text(json.dumps(epochs))


def read(folder: Path, title: str, rank: int) -> list[list[list[Any]]]:
    """The epochs that a rank has written down."""
    epochs: list[list[list[Any]]] = json.loads((folder / f"{title}-{rank}.json").read_text())
    return epochs


def first_life(folder: Path, runs: Sequence[Run], batch: int) -> NoReturn:
    """Trains each run without an interruption, and once more up to where its state is saved; then all ranks are killed."""
    begin()
    alive = []
    for index, run in enumerate(runs):
        seed = seed_of(run, index)
        seeded(seed)
        whole = trainer_of(run, batch)
        epochs = [whole.epoch() for _ in range(run.epoch + 3)]
        write(folder, f"whole-{index}", epochs)
        seeded(seed)
        trainer = trainer_of(run, batch)
        broken = [trainer.epoch() for _ in range(run.epoch)]
        if run.saved != "0":
            iterator = iter(trainer.loader)
            broken.append(trainer.epoch(islice(iterator, steps_before(run.saved, len(epochs[run.epoch])))))
        if run.saved == "end":
            assert next(iterator, None) is None
        trainer.accelerator.save_state(folder / f"saved-{index}")
        write(folder, f"broken-{index}", broken)
        lost = iter(trainer.loader) if run.saved in ("0", "end") else iterator
        trainer.epoch(islice(lost, 2))
        alive.append((trainer, lost))
        del alive[:-ALIVE]
    die_together()


def second_life(folder: Path, runs: Sequence[Run], batch: int) -> None:
    """Goes on with each run: what is left of the epoch, and the epoch behind it."""
    begin()
    for index, run in enumerate(runs):
        seeded(seed_of(run, index), drawn=3)
        trainer = trainer_of(run, batch)
        trainer.accelerator.load_state(folder / f"saved-{index}")
        write(folder, f"resumed-{index}", [trainer.epoch() for _ in range(2)])
