"""A rank that runs, but cannot answer, is waited for: another process of its machine says that it runs."""

from __future__ import annotations

import ctypes
import time

from accel_core import World
from accel_core.processes.watch import diagnosis, stack_location
from accel_testing import run_ranks

LOST = 2.0
"""Stands for the two minutes after which a silent rank is given up."""


def comes_late_from_another_machine() -> str:
    import os

    rank = int(os.environ["RANK"])
    stack_location._machine = lambda: "first" if rank == 0 else "second"
    diagnosis.LOST = LOST
    world = World.current(cpu=True)
    world.barrier()
    if rank == 2:
        time.sleep(2)  # answers, and waits
        ctypes.PyDLL(None).sleep(int(3 * LOST))  # as a large file that is parsed does, no other thread runs
    world.barrier()
    return "together"


def test_a_rank_of_another_machine_that_is_busy_is_not_given_up() -> None:
    assert run_ranks(comes_late_from_another_machine, 3, timeout=60) == ["together"] * 3
