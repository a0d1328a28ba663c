"""A process group that is not as asked for is refused by each rank alone: another one may have ended by the same error."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from accel_core import World, WorldError
from accel_testing import run_ranks


def refuses_late_on_rank_1() -> str:
    dist.init_process_group("gloo")
    if dist.get_rank() == 1:
        time.sleep(2)  # rank 0, which hosts the store, has gone
    with pytest.raises(WorldError) as caught:
        World.current(timeout=timedelta(seconds=77))
    return str(caught.value)


def test_every_rank_hears_the_same_whenever_it_asks() -> None:
    for said in run_ranks(refuses_late_on_rank_1, 2):
        assert "timeout=0:01:17 was asked for, it has 0:30:00" in said
