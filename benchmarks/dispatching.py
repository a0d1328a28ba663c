"""P6d: batches that one rank reads and sends to the others. Run by `run.py`, under torchrun."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from counting import Calls, Collectives
from libraries import BATCH
from reading import Sample, samples
from torch.utils.data import DataLoader
from worker import alternate, arguments, finish, join


class Scattered:
    """What one writes by hand for batches whose keys, shapes and number everybody knows: a scatter for each tensor."""

    def __init__(self, data: list[Sample]) -> None:
        self.world = dist.get_world_size()
        self.steps = len(data) // (BATCH * self.world)
        self.first = data[0]
        self.loader = DataLoader(data, batch_size=BATCH * self.world) if dist.get_rank() == 0 else None

    def __iter__(self) -> Iterator[Sample]:
        whole = iter(self.loader) if self.loader is not None else None
        for _ in range(self.steps):
            batch = None if whole is None else next(whole)
            part = {key: torch.empty(BATCH, *one.shape, dtype=one.dtype) for key, one in self.first.items()}
            for key, tensor in part.items():
                dist.scatter(tensor, None if batch is None else list(batch[key].chunk(self.world)))
            yield part


def sharded(data: list[Sample]) -> Iterable[Sample]:
    """Ours, every rank reading its own part."""
    from accel_core import Accelerator

    return Accelerator(cpu=True).prepare(DataLoader(data, batch_size=BATCH))


def accel(data: list[Sample]) -> Iterable[Sample]:
    """Ours."""
    from accel_core import Accelerator

    return Accelerator(cpu=True, dispatch_batches=True).prepare(DataLoader(data, batch_size=BATCH))


def accelerate(data: list[Sample]) -> Iterable[Sample]:
    """Hugging Face Accelerate."""
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration

    configuration = DataLoaderConfiguration(dispatch_batches=True)
    return Accelerator(cpu=True, dataloader_config=configuration).prepare(DataLoader(data, batch_size=BATCH))


LIBRARIES = {"sharded": sharded, "scatter": Scattered, "accel": accel, "accelerate": accelerate}


def timed(loader: Iterable[Sample], batches: int):
    """Seconds per batch: of the CPU in the main thread, on the mean of the ranks and on the busiest; on the wall."""

    def turn() -> dict[str, float]:
        wall, cpu = time.perf_counter(), time.thread_time()
        for _ in loader:
            pass
        cpu, wall = time.thread_time() - cpu, time.perf_counter() - wall
        busiest = torch.tensor(cpu, dtype=torch.float64)
        dist.all_reduce(busiest, dist.ReduceOp.MAX)
        return {"cpu": cpu / batches, "busiest": busiest.item() / batches, "wall": wall / batches}

    return turn


def counted(library: str, loader: Iterable[Sample], batches: int) -> dict[str, float]:
    """Collectives and pickles of a loop over data that has been read before."""
    with Collectives() as collectives, Calls(message_codes() if library == "accel" else ()) as calls:
        for _ in loader:
            pass
    messages = calls.functions if library == "accel" else batches
    return {
        "collectives": collectives.count / batches,
        "collectives_per_message": collectives.count / messages,
        "pickles": calls.pickles / batches,
    }


def message_codes():
    """By these calls, ours carries several batches at once."""
    from accel_data.batch_scatter import BatchScatter

    return {BatchScatter.post.__code__, BatchScatter.receive.__code__}


def main() -> None:
    options = arguments()
    rank, world = join()
    warnings.filterwarnings("ignore")  # of the peers
    data = samples(options.batches * BATCH * world)
    loaders = {name: LIBRARIES[name](data) for name in options.libraries if name in LIBRARIES}
    for name, loader in loaders.items():
        for batch, expected in zip(loader, loaders["sharded"], strict=True):
            torch.testing.assert_close(batch, expected, rtol=0, atol=0, msg=f"{name} reads other data")
    turns = {name: timed(loader, options.batches) for name, loader in loaders.items()}
    results = alternate(turns, options.rounds, world)
    counts = {name: counted(name, loader, options.batches) for name, loader in loaders.items()}
    for measured in results:
        for name, figures in measured.items():
            figures.update(counts[name])
    finish(options.out, rank, world, results)


if __name__ == "__main__":
    main()
