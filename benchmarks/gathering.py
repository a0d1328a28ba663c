"""P7: `gather_for_metrics` of two tensors, with work between the calls. Run by `run.py`, under torchrun."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable

import torch
import torch.distributed as dist
from counting import Collectives
from libraries import BATCH
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from worker import alternate, arguments, finish, join

CLASSES = 10
Pair = tuple[torch.Tensor, torch.Tensor]
Gather = Callable[[Pair], object]


def plain(data: TensorDataset) -> tuple[DataLoader, Gather]:
    """What one writes by hand: all_gather and cat, tensor by tensor. The padding of the last batch stays in."""

    def gather(tensor: torch.Tensor) -> torch.Tensor:
        parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, tensor)
        return torch.cat(parts)

    loader = DataLoader(data, batch_size=BATCH, sampler=DistributedSampler(data, shuffle=False))
    return loader, lambda pair: (gather(pair[0]), gather(pair[1]))


def accel(data: TensorDataset) -> tuple[DataLoader, Gather]:
    """Ours."""
    from accel_core import Accelerator

    accelerator = Accelerator(cpu=True)
    return accelerator.prepare(DataLoader(data, batch_size=BATCH)), accelerator.gather_for_metrics


def accelerate(data: TensorDataset) -> tuple[DataLoader, Gather]:
    """Hugging Face Accelerate."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    return accelerator.prepare(DataLoader(data, batch_size=BATCH)), accelerator.gather_for_metrics


LIBRARIES = {"plain": plain, "accel": accel, "accelerate": accelerate}


def timed(loader: DataLoader, gather: Gather):
    """Seconds of a call: of the clock on the wall, and of the CPU in the main thread."""
    work = torch.randn(192, 192)

    def turn() -> dict[str, float]:
        wall = cpu = 0.0
        for pair in loader:
            torch.mm(work, work)  # some 0.3 ms, as a small model would take
            wall_before, cpu_before = time.perf_counter(), time.thread_time()
            gather(pair)
            cpu += time.thread_time() - cpu_before
            wall += time.perf_counter() - wall_before
        return {"cpu": cpu / len(loader), "wall": wall / len(loader)}

    return turn


def collectives(loader: DataLoader, gather: Gather) -> float:
    """Collectives of a call, in a steady loop."""
    total = 0
    for pair in loader:
        with Collectives() as counter:
            gather(pair)
        total += counter.count
    return total / len(loader)


def main() -> None:
    options = arguments()
    rank, world = join()
    warnings.filterwarnings("ignore")  # of the peers
    samples = options.batches * BATCH * world - 3  # so that the last batch is filled up
    data = TensorDataset(torch.randn(samples, CLASSES), torch.randint(CLASSES, (samples,)))
    prepared = {name: LIBRARIES[name](data) for name in options.libraries if name in LIBRARIES}
    results = alternate({name: timed(*pair) for name, pair in prepared.items()}, options.rounds, world)
    counts = {name: collectives(*pair) for name, pair in prepared.items()}
    for measured in results:
        for name, figures in measured.items():
            figures["collectives"] = counts[name]
    finish(options.out, rank, world, results)


if __name__ == "__main__":
    main()
