"""Which part of the data a process reads."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from accel_core.contract.strategy import Layout, Shard


@pytest.mark.parametrize(("index", "count"), [(0, 1), (0, 3), (2, 3)])
def test_every_index_below_the_count_is_a_part(index: int, count: int) -> None:
    shard = Shard(index, count)
    assert (shard.index, shard.count) == (index, count)


@pytest.mark.parametrize(("index", "count"), [(2, 2), (-1, 2), (0, 0), (0, -1)])
def test_a_shard_outside_the_data_is_refused_with_what_to_type(index: int, count: int) -> None:
    with pytest.raises(ValueError) as caught:
        Shard(index, count)
    assert str(caught.value) == (
        f"Shard(index={index}, count={count}) names no part of the data: expected 0 <= index < count. "
        f"Type Shard(world.rank, world.size) for one part per process, or Shard(0, 1) for all of the "
        f"data."
    )


def test_under_data_parallelism_every_rank_reads_its_own_part() -> None:
    world = SimpleNamespace(rank=2, size=3)
    assert Layout.data_parallel(world) == Layout(Shard(2, 3))  # type: ignore[arg-type]
