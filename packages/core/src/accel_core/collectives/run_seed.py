"""The seed of the run: set by `set_seed`, agreed on by `agree_seed`."""

from __future__ import annotations

import importlib
import importlib.util
import operator
import os
import random
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from accel_core.base.seeds import derive_seed
from accel_core.processes.launch_environment import read_place

if TYPE_CHECKING:
    from accel_core.processes.world import World

_TORCH_SEEDS = 2**64  # what torch.manual_seed can hold, and what torch.initial_seed returns
_NUMPY_SEEDS = 2**32


def set_seed(seed: int, device_specific: bool = False, deterministic: bool = False) -> None:
    """Seeds `random`, torch on the CPU and accelerators, and NumPy if installed. No collective.

    Args:
        seed: from 0 to 2**64 - 1. NumPy gets it up to 2**32 - 1, else `derive_seed(seed) % 2**32`.
        device_specific: adds the rank (modulo 2**64); rank 0's seed stays the seed of the run.
        deterministic: also calls `torch.use_deterministic_algorithms(True)`, and sets the variable
            CUBLAS_WORKSPACE_CONFIG, unless it is set.
    """
    seed = operator.index(seed)
    if device_specific:
        seed = (seed + _rank()) % _TORCH_SEEDS
    torch.manual_seed(seed)
    random.seed(seed)
    if importlib.util.find_spec("numpy") is not None:
        importlib.import_module("numpy").random.seed(seed if seed < _NUMPY_SEEDS else derive_seed(seed) % _NUMPY_SEEDS)
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)


def agree_seed(world: World, given: int | None = None) -> int:
    """The run's seed, 0 to 2**64 - 1, the same on every rank. Collective unless in a world of one.

    It is `given`, else `torch.initial_seed()` of rank 0. Nothing is drawn. Raises `ValueError` on
    every rank if they were given different seeds.
    """
    own = torch.initial_seed() if given is None else given
    if world.size == 1:
        return own
    from accel_core.collectives.objects import gather_objects

    told: list[tuple[int | None, int]] = gather_objects([(given, own)], world)
    others = [rank for rank, (seed, _) in enumerate(told) if seed != told[0][0]]
    if others:
        raise ValueError(
            f"data_seed is {told[0][0]} on rank 0 and {told[others[0]][0]} on rank {others[0]}, so the ranks would not read "
            f"parts of one order. Give all ranks the same data_seed, or none."
        )
    return told[0][1]


def _rank() -> int:
    # Not World.current(), whose first call starts the process group, and chooses the device before the Accelerator can.
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    return read_place(os.environ).rank
