"""Reads one loader after the other on one rank, saves where each stands, and is killed; then goes on in new processes.

A rank writes what it reads into a journal, one line a step, so that what is left behind by a killed process can be compared.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch.utils.data import DataLoader, IterableDataset, WeightedRandomSampler, get_worker_info

from accel_core import Accelerator
from accel_data import SeedableRandomSampler

SAMPLES = 29
SAVED = ("0", "1", "k", "last", "end")
WORKERS = ("none", "two", "persistent")
ALIVE = 2
"""How many of the last iterations still live, with their workers, when the process is killed."""


@dataclass(frozen=True)
class Run:
    """One loader, and where its state is saved.

    Args:
        kind: of the loader, a key of `LOADERS`.
        workers: one of `WORKERS`.
        saved: behind no batch of the epoch (its iterator is made), behind the first, behind the half of them, behind the last,
            or at the "end": when the loop has been left.
        epoch: in which epoch.
        seeded: whether the run sets a seed. A process of a run that does not has another one when it is started again.
    """

    kind: str
    workers: str = "none"
    saved: str = "k"
    epoch: int = 0
    seeded: bool = True


class Drawn:
    """A sampler of the user's own that has no generator: it draws from a global stream."""

    def __init__(self, draw: str) -> None:
        self.draw = draw

    def __iter__(self) -> Iterator[int]:
        order = list(range(SAMPLES))
        if self.draw == "python":
            random.shuffle(order)
        else:
            order = torch.randperm(SAMPLES).tolist()
        return iter(order)

    def __len__(self) -> int:
        return SAMPLES


class DrawnBatches:
    """A batch sampler of the user's own, with no attribute, whose batches have these sizes in turn."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = sizes

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(SAMPLES).tolist()
        while order:
            for size in self._sizes:
                if order:
                    yield order[:size]
                order = order[size:]


class Stream(IterableDataset[int]):
    """Samples in another order in each epoch. Workers share them."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def ids(self) -> list[int]:
        return [(7 * i + 5 * self.epoch) % SAMPLES for i in range(SAMPLES)]

    def __iter__(self) -> Iterator[int]:
        worker = get_worker_info()
        return iter(self.ids() if worker is None else self.ids()[worker.id :: worker.num_workers])


class Tape(Stream):
    """A stream that knows where it stands."""

    def __init__(self) -> None:
        super().__init__()
        self.at = self.start = 0

    def __iter__(self) -> Iterator[int]:
        self.at, self.start = self.start, 0
        for sample in islice(super().__iter__(), self.at, None):
            self.at += 1
            yield sample

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "epoch": self.epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.start, self.epoch = state["at"], state["epoch"]


class EpochOrder(Stream):
    """The same as a sampler."""

    def __len__(self) -> int:
        return SAMPLES


def own_generator() -> torch.Generator:
    """A generator that no other process has."""
    return torch.Generator().manual_seed(os.getpid())


def of_ids(batch: int, **options: Any) -> DataLoader[Any]:
    """A loader of the numbers themselves."""
    return DataLoader(range(SAMPLES), batch_size=batch, **options)  # type: ignore[arg-type]


def with_own_batches(batch: int, *, sizes: Sequence[int] = (1,), **options: Any) -> DataLoader[Any]:
    """A loader with a batch sampler of the user's own; the sizes are multiples of the batch."""
    return DataLoader(range(SAMPLES), batch_sampler=DrawnBatches([batch * size for size in sizes]), **options)  # type: ignore[arg-type]


def with_generator(batch: int, **options: Any) -> DataLoader[Any]:
    """A loader that is handed a generator."""
    return of_ids(batch, shuffle=True, generator=own_generator(), **options)


def of_a_stream(batch: int, **options: Any) -> DataLoader[Any]:
    """A loader of an iterable dataset."""
    return DataLoader(Stream(), batch, **options)


def of_a_tape(batch: int, **options: Any) -> DataLoader[Any]:
    """A loader of an iterable dataset with a state of its own."""
    return DataLoader(Tape(), batch, **options)


def stateful(batch: int, **options: Any) -> DataLoader[Any]:
    """torchdata's loader with a state of its own, over indices."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(range(SAMPLES), batch, shuffle=True, **options)  # type: ignore[arg-type]


def stateful_of_a_tape(batch: int, **options: Any) -> DataLoader[Any]:
    """torchdata's loader with a state of its own, over a dataset that has one too."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(Tape(), batch, **options)


def nodes(batch: int, **_: Any) -> Any:
    """torchdata's pipeline of nodes, which makes its batches itself."""
    from torchdata.nodes import Batcher, Loader, Mapper, SamplerWrapper

    return Loader(Mapper(Batcher(SamplerWrapper(EpochOrder()), batch, drop_last=False), torch.tensor))


Build = Callable[..., Any]

LOADERS: dict[str, tuple[Build, dict[str, Any]]] = {
    "in turn": (of_ids, {}),
    "shuffled": (partial(of_ids, shuffle=True), {}),
    "shuffled, dispatched": (partial(of_ids, shuffle=True), {"dispatch_batches": True}),
    "shuffled as the seeds say": (partial(of_ids, shuffle=True), {"use_seedable_sampler": True}),
    "seedable sampler": (lambda batch, **o: of_ids(batch, sampler=SeedableRandomSampler(range(SAMPLES)), **o), {}),
    "weighted": (lambda batch, **o: of_ids(batch, sampler=WeightedRandomSampler([1.0] * 9, SAMPLES), **o), {}),
    "a generator": (with_generator, {}),
    "own sampler, python": (lambda batch, **o: of_ids(batch, sampler=Drawn("python"), **o), {}),
    "own sampler, torch": (lambda batch, **o: of_ids(batch, sampler=Drawn("torch"), **o), {}),
    "own sampler, dispatched": (
        lambda batch, **o: of_ids(batch, sampler=Drawn("torch"), **o),
        {"dispatch_batches": True},
    ),
    "own batches": (with_own_batches, {}),
    "own batches that vary": (partial(with_own_batches, sizes=(2, 1, 3)), {}),
    "stream": (of_a_stream, {}),
    "shared stream": (of_a_stream, {"dispatch_batches": False}),
    "tape": (of_a_tape, {}),
    "StatefulDataLoader": (stateful, {}),
    "StatefulDataLoader of a tape": (stateful_of_a_tape, {}),
    "nodes": (nodes, {}),
}


class Reader:
    """A prepared loader, as a user's script makes it, and its Accelerator.

    Args:
        kind: of the loader, a key of `LOADERS`.
        batch: rows of a batch, as the loader is built.
        workers: one of `WORKERS`.
        options: of the Accelerator, beside those that belong to the kind.
    """

    def __init__(self, kind: str, batch: int, workers: str = "none", **options: Any) -> None:
        build, more = LOADERS[kind]
        self.accelerator = Accelerator(cpu=True, **more, **options)
        used = {} if workers == "none" else {"num_workers": 2, "persistent_workers": workers == "persistent"}
        self.loader = self.accelerator.prepare(build(batch, **used))

    def gathered(self, batch: torch.Tensor) -> list[int]:
        """The ids of a batch on all ranks, without what only fills up."""
        return self.accelerator.gather_for_metrics(batch).tolist()


class Journal:
    """What one rank reads of one run, step by step, in a file.

    Args:
        folder: of all journals.
        title: of this one.
    """

    def __init__(self, folder: Path, title: str) -> None:
        self.file = folder / f"{title}-{os.environ['RANK']}.jsonl"

    def write(self, epoch: int, reader: Reader, batches: Iterable[torch.Tensor] | None = None) -> None:
        """Reads batches, those of an iteration by default. Each gets a line when it has been read."""
        with self.file.open("a") as file:
            for step, batch in enumerate(reader.loader if batches is None else batches):
                print(json.dumps([epoch, step, batch.tolist(), reader.gathered(batch)]), file=file, flush=True)


Step = tuple[list[int], list[int]]
"""The ids that a rank has read, and those that all ranks have read, without what only fills up."""


def read_journal(folder: Path, title: str, rank: int) -> dict[int, list[Step]]:
    """The steps that a rank has made, epoch by epoch."""
    epochs: dict[int, list[Step]] = {}
    file = folder / f"{title}-{rank}.jsonl"
    for epoch, step, ids, gathered in map(json.loads, file.read_text().splitlines() if file.exists() else []):
        steps = epochs.setdefault(epoch, [])
        assert step == len(steps)
        steps.append((ids, gathered))
    return epochs


def save(state: dict[str, Any], file: Path) -> None:
    """Writes a state on the main process."""
    if os.environ["RANK"] == "0":
        torch.save(state, file.with_suffix(".new"))
        os.replace(file.with_suffix(".new"), file)


def steps_before(saved: str, steps: int) -> int:
    """How many of the steps of an epoch come before the state is saved."""
    return {"0": 0, "1": 1, "k": steps // 2, "last": steps, "end": steps}[saved]


def read_to_the_save(reader: Reader, run: Run, journal: Journal, steps: int, file: Path) -> Any:
    """Reads up to where the state is saved, saves it, and reads on; gives the iterator."""
    for epoch in range(run.epoch):
        journal.write(epoch, reader)
    iterator = iter(reader.loader)
    journal.write(run.epoch, reader, islice(iterator, steps_before(run.saved, steps)))
    if run.saved == "end":
        assert next(iterator, None) is None
    save(reader.loader.state_dict(), file)
    lost = iter(reader.loader) if run.saved == "end" else iterator
    for _ in islice(lost, 2):
        pass
    return lost


def begin() -> None:
    """Makes this process what a script is that a launcher has started.

    A rank leads a group of its own, so that its workers die with it when a scheduler ends the job; here they are its forks.
    """
    assert os.getpgid(0) == os.getpid()
    multiprocessing.set_start_method("fork", force=True)


def seed_of(run: Run, index: int) -> int:
    """The seed of a run: its own, or one that no other process has."""
    return index if run.seeded else torch.seed()


def first_life(folder: Path, runs: Sequence[Run], batch: int) -> NoReturn:
    """Reads each run without an interruption, and once more up to where its state is saved; then all ranks are killed."""
    begin()
    alive = []
    for index, run in enumerate(runs):
        seed = seed_of(run, index)
        torch.manual_seed(seed)
        whole = Reader(run.kind, batch, run.workers)
        for epoch in range(run.epoch + 3):
            Journal(folder, f"whole-{index}").write(epoch, whole)
        steps = len(read_journal(folder, f"whole-{index}", int(os.environ["RANK"])).get(run.epoch, []))
        torch.manual_seed(seed)
        reader, journal = Reader(run.kind, batch, run.workers), Journal(folder, f"broken-{index}")
        alive.append(read_to_the_save(reader, run, journal, steps, folder / f"{index}.state"))
        del alive[:-ALIVE]
    die_together()


def second_life(folder: Path, runs: Sequence[Run], batch: int) -> None:
    """Goes on with each run: what is left of the epoch, and the epoch behind it."""
    begin()
    for index, run in enumerate(runs):
        torch.manual_seed(seed_of(run, index))
        reader = Reader(run.kind, batch, run.workers)
        reader.loader.load_state_dict(torch.load(folder / f"{index}.state"))
        for epoch in range(2):
            Journal(folder, f"resumed-{index}").write(epoch, reader)


@dataclass(frozen=True)
class Chain:
    """A loader that is read by ever other numbers of processes.

    Args:
        kind: of the loader, a key of `LOADERS`.
        global_batch: rows of a batch over all ranks; None: batches of `batch` rows for each rank, however many there are.
        batch: rows of a batch of a rank.
        split: the loader makes global batches, which are split.
    """

    kind: str
    global_batch: int | None = None
    batch: int = 3
    split: bool = False

    def reader(self) -> Reader:
        """The loader, as this number of processes makes it."""
        ranks = 1 if self.split else int(os.environ["WORLD_SIZE"])
        batch = self.batch if self.global_batch is None else self.global_batch // ranks
        return Reader(self.kind, batch, split_batches=self.split)


def leg(folder: Path, chains: Sequence[Chain], number: int, last: bool) -> None:
    """Goes on with each chain for one step, saves, and reads one more; then all ranks are killed. The last goes on to the end.

    The first leg reads two epochs beforehand, for the comparison.
    """
    begin()
    for index, chain in enumerate(chains):
        state = folder / f"{index}.state"
        torch.manual_seed(index)
        if number == 0:
            whole = chain.reader()
            for epoch in range(2):
                Journal(folder, f"whole-{index}").write(epoch, whole)
            torch.manual_seed(index)
        reader, journal = chain.reader(), Journal(folder, f"leg-{number}-{index}")
        if number:
            reader.loader.load_state_dict(torch.load(state))
        if last:
            for epoch in range(2):
                journal.write(epoch, reader)
        else:
            batches = iter(reader.loader)
            journal.write(0, reader, islice(batches, 1))
            save(reader.loader.state_dict(), state)
            next(batches)
    if not last:
        die_together()


def die_together() -> NoReturn:
    """Rank 0 kills the others, and then itself."""
    processes = Accelerator(cpu=True).gather(torch.tensor([os.getpid()])).tolist()
    while os.getpid() != processes[0]:
        signal.pause()
    shoot(processes)
    raise AssertionError("a killed process does not go on")


def shoot(processes: Sequence[int]) -> None:
    """Kills the processes, which lead groups of their own, and their workers; this one, which is the first, comes last."""
    for process in reversed(processes):
        os.killpg(process, signal.SIGKILL)
