"""P10: going on at batch 10^6 of a shuffled set of 10^9, and what an index of its order costs. Run by `run.py`.

Accelerate reads what it leaves out, and draws the whole order: it goes on at batch 10^4 of a set of 10^6.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from libraries import BATCH
from torch.utils.data import DataLoader, Dataset, Sampler
from worker import alternate, arguments, finish, join

SIZE, SEEN = 10**9, 10**6
SMALL_SIZE, SMALL_SEEN = 10**6, 10**4
BLOCK, BLOCKS = 4096, 32
DRAWN = 10**7  # of torch's permutation, which is materialised: 10^9 would be 8 GB


class Numbers(Dataset):
    """The numbers below `size`. It counts what is read of them, in this process."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.read = 0

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> torch.Tensor:
        self.read += 1
        return torch.tensor(index)


class Backwards(Sampler):
    """A sampler of the user's own, of which a loader can only know what it yields."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.size - 1, -1, -1))


class Resume:
    """Makes loaders, and goes on with each behind some batches."""

    def __init__(self) -> None:
        from accel_core import Accelerator

        self.accelerator = Accelerator(cpu=True)

    def __call__(self, size: int, batches: int, own_sampler: bool = False, **options: int) -> dict[str, float]:
        """Seconds from the state to the first batch, and how many samples were read in this process that are not in it."""
        data = Numbers(size)
        order = {"sampler": Backwards(size)} if own_sampler else {"shuffle": True}
        loader = self.accelerator.prepare(DataLoader(data, batch_size=BATCH, **order, **options))
        state = {**loader.state_dict(), "samples": batches * BATCH}
        before = time.perf_counter()
        loader.load_state_dict(state)
        iterator = iter(loader)
        batch = next(iterator)
        taken = time.perf_counter() - before
        last = size - 1 - batches * BATCH
        right = not own_sampler or batch.tolist() == list(range(last, last - BATCH, -1))
        if not right or batch.unique().numel() != BATCH or loader.state_dict()["samples"] != (batches + 1) * BATCH:
            raise SystemExit(f"After {batches} batches comes {batch}, and then {loader.state_dict()}.")
        return {"seconds": taken, "other": data.read - BATCH}


def memory(resume: Callable[[int, int], object]) -> float:
    """Bytes by which the resident memory of this process grows at most, on the first time that it goes on in a large set.

    Linux only.
    """
    resume(1000, 2)
    Path("/proc/self/clear_refs").write_text("5")  # the peak is now what is resident
    before = _resident("VmRSS")
    resume(SIZE, SEEN)
    return _resident("VmHWM") - before


def _resident(name: str) -> int:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024


def resuming(resume: Resume, peak: float):
    """Ours."""
    from accel_data.order import ShuffledOrder

    def turn() -> dict[str, float]:
        here, workers = resume(SIZE, SEEN), resume(SIZE, SEEN, num_workers=2)
        own = resume(SIZE, SEEN, own_sampler=True)
        order = ShuffledOrder(SIZE, SIZE, key=1)
        blocks = [torch.arange(first, first + BLOCK) for first in range(0, BLOCK * BLOCKS, BLOCK)]
        before = time.thread_time()
        for positions in blocks:
            order.at(positions)
        return {
            "first": here["seconds"],
            "small": resume(SMALL_SIZE, SMALL_SEEN)["seconds"],
            "other": max(here["other"], own["other"]),
            "workers": workers["seconds"],
            "own_sampler": own["seconds"],
            "memory": peak,
            "order": (time.thread_time() - before) / (BLOCK * BLOCKS),
        }

    return turn


def skipping() -> Callable[[], dict[str, float]]:
    """Accelerate's own way."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)

    def turn() -> dict[str, float]:
        loader = accelerator.prepare(DataLoader(Numbers(SMALL_SIZE), batch_size=BATCH, shuffle=True))
        before = time.perf_counter()
        next(iter(accelerator.skip_first_batches(loader, SMALL_SEEN)))
        return {"small": time.perf_counter() - before}

    return turn


def drawing() -> dict[str, float]:
    """torch's permutation."""
    before = time.thread_time()
    torch.randperm(DRAWN)
    return {"order": (time.thread_time() - before) / DRAWN}


def main() -> None:
    options = arguments()
    rank, world = join()
    resume = Resume()
    turns = {"accel": resuming(resume, memory(resume)), "plain": drawing}
    if "accelerate" in options.libraries:
        turns["accelerate"] = skipping()
    finish(options.out, rank, world, alternate(turns, options.rounds, world))


if __name__ == "__main__":
    main()
