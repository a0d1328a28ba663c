"""P6: what a batch costs that is read through a prepared loader. Run by `run.py`, as one process."""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence

import torch
from libraries import BATCH
from torch.utils.data import DataLoader
from worker import alternate, arguments, finish, join

WIDTH = 32
LONGER = 8  # times as many batches as a step has time for: reading alone is that much quicker
Sample = dict[str, torch.Tensor]


def samples(count: int) -> list[Sample]:
    """Samples as a tokenizer leaves them: dicts of 4 tensors."""
    torch.manual_seed(1)
    return [
        {
            "ids": torch.randint(50_000, (WIDTH,)),
            "mask": torch.ones(WIDTH, dtype=torch.int64),
            "values": torch.randn(WIDTH),
            "label": torch.tensor(number),
        }
        for number in range(count)
    ]


class Fetching(list[Sample]):
    """A dataset that is asked for a whole batch at once, as those that read files are."""

    def __getitems__(self, indices: Sequence[int]) -> list[Sample]:
        return [self[index] for index in indices]


def plain(loader: DataLoader) -> DataLoader:
    """torch's own."""
    return loader


def accel(loader: DataLoader) -> DataLoader:
    """Ours, which always knows its position."""
    from accel_core import Accelerator

    return Accelerator(cpu=True).prepare(loader)


def accelerate(loader: DataLoader) -> DataLoader:
    """Hugging Face Accelerate."""
    from accelerate import Accelerator

    return Accelerator(cpu=True).prepare(loader)


def fabric(loader: DataLoader) -> DataLoader:
    """Lightning Fabric."""
    from lightning_fabric import Fabric

    return Fabric(accelerator="cpu", devices=1).setup_dataloaders(loader)


LIBRARIES = {"plain": plain, "accel": accel, "accelerate": accelerate, "fabric": fabric}
DATASETS = {"single": list, "many": Fetching}


def timed(loaders: dict[str, DataLoader]):
    """Seconds per batch of each loader, of the CPU in the main thread."""

    def turn() -> dict[str, float]:
        figures = {}
        for name, loader in loaders.items():
            before = time.thread_time()
            for _ in loader:
                pass
            figures[name] = (time.thread_time() - before) / len(loader)
        return figures

    return turn


def same(loader: DataLoader, other: DataLoader) -> None:
    """Raises unless both give equal batches."""
    for batch, expected in zip(loader, other, strict=True):
        torch.testing.assert_close(batch, expected, rtol=0, atol=0)


def main() -> None:
    options = arguments()
    rank, world = join()
    warnings.filterwarnings("ignore")  # of the peers
    data = samples(options.batches * LONGER * BATCH)
    datasets = {name: kind(data) for name, kind in DATASETS.items()}
    prepared = {
        library: {name: LIBRARIES[library](DataLoader(dataset, batch_size=BATCH)) for name, dataset in datasets.items()}
        for library in options.libraries
        if library in LIBRARIES
    }
    for loaders in prepared.values():
        for name, loader in loaders.items():
            same(loader, prepared["plain"][name])
    turns = {library: timed(loaders) for library, loaders in prepared.items()}
    finish(options.out, rank, world, alternate(turns, options.rounds, world))


if __name__ == "__main__":
    main()
