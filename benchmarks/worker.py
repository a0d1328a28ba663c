"""What every measuring process has in common: its arguments, its place in the world, and rounds that alternate.

A worker runs all libraries in one process, in turns: each round gives one figure per library, taken within a fraction of a
second of the others, on the same memory and the same clock. Which library begins changes with the round.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import torch.distributed as dist

Round = dict[str, dict[str, float]]
"""For each library, what was measured in one round."""


def arguments() -> argparse.Namespace:
    """What `launch.measure` passes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--libraries", type=lambda text: text.split(","), required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--batches", type=int, required=True)
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--size", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


def join() -> tuple[int, int]:
    """Starts the process group, if there is a launcher. Returns rank and world size."""
    torch.set_num_threads(1)
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1:
        dist.init_process_group("gloo")
    return int(os.environ.get("RANK", "0")), world


def alternate(turns: Mapping[str, Callable[[], dict[str, float]]], rounds: int, world: int) -> list[Round]:
    """Lets every library take a turn in every round, after two rounds that are thrown away."""
    names = list(turns)
    results = []
    for number in range(-2, rounds):
        if number == 0:
            gc.collect()
            gc.freeze()  # what setting up has left is walked by no collection while somebody is measured
        first = number % len(names)
        measured = {}
        for name in names[first:] + names[:first]:
            gc.collect()
            if world > 1:
                dist.barrier()
            measured[name] = turns[name]()
        results.append(measured)
    return results[2:]


def finish(out: Path, rank: int, world: int, results: list[Round]) -> None:
    """Writes this rank's rounds. The process then ends without destructors, which belong to five libraries."""
    (out / f"{rank}.json").write_text(json.dumps(results), encoding="utf-8")
    if world > 1:
        dist.barrier()
    os._exit(0)
