"""P2, P3, P4: what a training step costs. Run by `run.py`, as one process or under torchrun."""

from __future__ import annotations

import time
import warnings

import torch
from libraries import LOOPS, Epoch, Job
from worker import alternate, arguments, finish, join


def timed(epoch: Epoch, batches: int):
    """Seconds per micro-batch: of the clock on the wall, and of the CPU in the main thread."""

    def turn() -> dict[str, float]:
        wall, cpu = time.perf_counter(), time.thread_time()
        epoch()
        return {"cpu": (time.thread_time() - cpu) / batches, "wall": (time.perf_counter() - wall) / batches}

    return turn


def main() -> None:
    options = arguments()
    rank, world = join()
    warnings.filterwarnings("ignore")  # of the peers
    jobs = {name: Job(options.batches, options.accumulation, world, rank) for name in options.libraries}
    epochs = {name: LOOPS[name](job) for name, job in jobs.items()}
    for name, job in jobs.items():
        epochs[name]()
        difference = f"after an epoch, {name} has other weights than {options.libraries[0]}"
        torch.testing.assert_close(job.weights(), jobs[options.libraries[0]].weights(), msg=difference)
    turns = {name: timed(epoch, options.batches) for name, epoch in epochs.items()}
    finish(options.out, rank, world, alternate(turns, options.rounds, world))


if __name__ == "__main__":
    main()
