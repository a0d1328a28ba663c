"""Every sample counts exactly once, whatever the batch, the padding and the kind of data."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from together import Together

from accel_core.base.errors import CollectiveMismatchError
from accel_core.base.torch_versions import COLLECTIVES
from accel_core.collectives.metrics import gather_for_metrics
from accel_core.contract.loader_progress import Feed, Rows
from accel_core.processes.world import World
from accel_testing import run_ranks

PER_RANK = 3
ON_TWO = Together(2)


class Alone:
    rank = 0
    size = 1
    device = torch.device("cpu")


ALONE: Any = Alone()


def batches(samples: int, rank: int, ranks: int) -> list[tuple[list[int], Rows]]:
    """What a padding loader yields on one rank: the ids of each batch, and how many are real; global order is kept."""
    per_step = PER_RANK * ranks
    out = []
    for start in range(0, samples, per_step):
        ids = [start + rank * PER_RANK + index for index in range(PER_RANK)]
        out.append(
            ([id if id < samples else id % samples for id in ids], Rows(PER_RANK, sum(id < samples for id in ids)))
        )
    return out


def gather_all() -> None:
    world = World.current()
    for samples in range(1, 20):
        tensors: list[int] = []
        texts: list[str] = []
        ragged: list[int] = []
        for ids, rows in batches(samples, world.rank, world.size):
            rank_ids = torch.tensor(ids)
            predictions = {
                "ids": rank_ids,
                "logits": torch.stack([rank_ids, -rank_ids], 1).float(),
                "loss": torch.tensor(1.0),
            }
            gathered = gather_for_metrics(predictions, rows, world)
            tensors += gathered["ids"].tolist()
            assert torch.equal(gathered["logits"][:, 1], -gathered["ids"].float())
            assert gathered["loss"].tolist() == [1.0] * world.size
            texts += gather_for_metrics([str(id) for id in ids], rows, world)
            pieces = gather_for_metrics([torch.full((id,), id) for id in ids], rows, world, use_gather_object=True)
            ragged += [len(piece) for piece in pieces]
        assert tensors == list(range(samples))
        assert texts == [str(id) for id in range(samples)]
        assert ragged == list(range(samples))


@pytest.mark.parametrize("ranks", [2, 3])
def test_every_sample_is_gathered_once_and_in_order(ranks: int) -> None:
    """Ids equal those of one process for any number of samples; tensors, strings, and one tensor per sample."""
    run_ranks(gather_all, ranks)


@ON_TWO
def gather_a_dead_iterators_batch() -> list[int]:
    """As `gather_for_metrics(next(iter(loader)))` does: 9 samples in batches of 5 on 2 ranks."""
    world = World.current()
    feed = Feed()
    passage = feed.enter()
    rows = Rows(5, 5 - world.rank)
    passage.advance(0, rows)
    passage.leave()
    ids = torch.arange(5) + 5 * world.rank
    return gather_for_metrics(ids, feed.current_rows(), world).tolist()


def test_the_batch_of_a_dead_iterator_is_exact_too() -> None:
    assert ON_TWO.run(gather_a_dead_iterators_batch) == [list(range(9))] * 2


@ON_TWO
def gather_without_rows() -> tuple[list[int], list[str]]:
    world = World.current()
    ids = torch.arange(world.rank + 1)
    return gather_for_metrics(ids, None, world).tolist(), gather_for_metrics(["a"] * world.rank, None, world)


def test_without_rows_everything_is_gathered() -> None:
    assert ON_TWO.run(gather_without_rows) == [([0, 0, 1], ["a"])] * 2


@ON_TWO
def count_collectives_of_an_epoch() -> list[int]:
    world = World.current()
    calls = 0
    original = getattr(dist, COLLECTIVES["all_gather_single"])

    def counting(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        return original(*args, **kwargs)

    setattr(dist, COLLECTIVES["all_gather_single"], counting)
    counts = []
    for ids, rows in batches(50, world.rank, world.size):
        before = calls
        gather_for_metrics((torch.tensor(ids), torch.zeros(PER_RANK, 10)), rows, world)
        counts.append(calls - before)
    setattr(dist, COLLECTIVES["all_gather_single"], original)
    return counts


def test_one_collective_per_batch_also_for_the_last() -> None:
    """Exactly one collective."""
    assert ON_TWO.run(count_collectives_of_an_epoch) == [[1] * 9] * 2


@ON_TWO
def misuse() -> list[str]:
    world = World.current()
    full, padded = Rows(3, 3), Rows(3, 2 + world.rank)
    cases: list[tuple[Any, Rows, type[Exception]]] = [
        ({"ids": torch.zeros(3), "all": [torch.zeros(12)]}, full, ValueError),
        (torch.zeros(4), padded, ValueError),
        (["a", "b"], full, ValueError),
        ({"text": ["a", "b", "c"]}, full, TypeError),
        ("abc", full, TypeError),
        ((torch.zeros(3), None, "a name"), padded, TypeError),  # as many as the batch has rows: no object per sample
    ]
    texts = []
    for data, rows, kind in cases:
        with pytest.raises(kind) as caught:
            gather_for_metrics(data, rows, world)
        texts.append(str(caught.value))
    with pytest.raises(ValueError if world.rank else CollectiveMismatchError) as caught:  # only one rank is wrong
        gather_for_metrics(torch.zeros(4 if world.rank else 3), full, world)
    texts.append(str(caught.value))
    return texts


def test_what_is_not_per_sample_fails_on_every_rank_and_on_full_batches() -> None:
    first, second = ON_TWO.run(misuse)
    assert first[:6] == second[:6]
    assert "data['all'][0] with shape [12] does not have one row per sample of the batch, which has 3 rows" in first[0]
    assert "Call gather_for_metrics once per batch, inside the loop" in first[0]
    assert "use gather(); for a list of one tensor per sample, use_gather_object=True." in first[0]
    assert "a list of 2 objects does not have one per sample" in first[2]
    assert "For other lists use torch.distributed.all_gather_object." in first[2]
    assert "gather_for_metrics(dict): values that are no tensors are gathered from a list or a tuple" in first[3]
    assert "Gather tensors and each list of objects in calls of their own." in first[3]
    assert "gather_for_metrics(str)" in first[4]
    assert "gather_for_metrics(tuple): values that are no tensors are gathered from a list or a tuple" in first[5]
    assert "rank 1: ValueError: gather_for_metrics: data with shape [4]" in first[6]


def test_a_world_of_one_returns_what_it_is_given() -> None:
    data = {"ids": torch.arange(3), "texts": ["a"]}
    assert gather_for_metrics(data, Rows(3, 3), ALONE) is data
    ids = torch.arange(3)
    assert gather_for_metrics(ids, Rows(3, 3), ALONE) is ids
    assert gather_for_metrics(ids, None, ALONE) is ids
    assert gather_for_metrics(torch.tensor(1.0), Rows(3, 3), ALONE).shape == (1,)
    assert gather_for_metrics(["a", "b"], Rows(2, 2), ALONE) == ["a", "b"]


def test_a_world_of_one_drops_padding_too() -> None:
    both = gather_for_metrics((torch.arange(3), torch.tensor(1.0), torch.zeros(5)), Rows(3, 2), ALONE)
    assert [leaf.tolist() for leaf in both] == [[0, 1], [1.0], [0.0] * 5]
    assert gather_for_metrics(("a", "b", "c"), Rows(3, 1), ALONE) == ("a",)
