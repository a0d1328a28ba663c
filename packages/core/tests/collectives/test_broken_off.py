"""A collective that a backend has broken off, and that returns all the same, gives no values of an earlier one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from accel_core.base.torch_versions import COLLECTIVES
from accel_core.collectives.objects import gather_objects
from accel_core.collectives.reduce_gather import gather, reduce_tree
from accel_core.processes.world import World
from accel_testing import run_ranks

CALLS: list[Callable[[torch.Tensor, World], Any]] = [
    gather,
    reduce_tree,
    lambda x, world: gather_objects([float(x[0])], world),
]


def broken_off(call: int, on_rank: int | None) -> list[str]:
    """What three calls say of a rank whose backend returns without having written, as one does whose communicator is aborted."""
    world, x = World.current(), torch.ones(2)
    CALLS[call](x, world)
    original = getattr(dist, COLLECTIVES["all_gather_single"])
    if on_rank is None:  # nobody writes anything
        setattr(dist, COLLECTIVES["all_gather_single"], lambda *args, **options: None)
    elif world.rank == on_rank:  # the others write, and it does not see that

        def unseen(output: torch.Tensor, given: torch.Tensor, **options: Any) -> None:
            original(output.clone(), given, **options)

        setattr(dist, COLLECTIVES["all_gather_single"], unseen)
    said = []
    for _ in range(3):
        try:
            said.append(f"returned {CALLS[call](x * 100, world)}")
        except dist.DistError as error:
            said.append(str(error))
    setattr(dist, COLLECTIVES["all_gather_single"], original)
    return said


@pytest.mark.parametrize("call", range(len(CALLS)))
def test_what_an_earlier_call_has_left_is_not_returned(call: int) -> None:
    for said in run_ranks(broken_off, 2, call, None):
        assert ["may be older than this call" in each for each in said] == [True] * 3


def test_the_rank_that_sees_nothing_raises() -> None:
    first, second = run_ranks(broken_off, 2, 0, 1)
    assert first[0] == "returned tensor([100., 100., 100., 100.])"
    assert ["was broken off" in said for said in (*first[1:], *second)] == [True] * 5


def after_a_verdict() -> str:
    world = World.current()
    assert gather(torch.ones(1), world).tolist() == [1.0, 1.0]
    assert world.watch is not None
    world.watch.verdict = "rank 7 was stopped."
    with pytest.raises(dist.DistError, match="broken off") as caught:
        gather(torch.ones(1), world)
    world.watch.verdict = ""
    return str(caught.value)


def test_after_a_verdict_of_the_watch_nothing_that_arrives_is_used() -> None:
    for said in run_ranks(after_a_verdict, 2):
        assert said.endswith("rank 7 was stopped.")
