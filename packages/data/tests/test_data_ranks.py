"""Sharded loaders on real ranks: exact metrics, and a generator of the user's that is shared."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader, SubsetRandomSampler

from accel_core import Accelerator, CollectiveMismatchError, Feed, Shard, World
from accel_data import Sharded
from accel_testing.ranks import run_ranks


def epochs_with_generators_that_differ(workers):
    world = World.current(cpu=True)
    generator = torch.Generator().manual_seed(10 + world.rank)
    sampler = SubsetRandomSampler(range(10), generator=generator)
    loader = DataLoader(range(10), batch_size=2, sampler=sampler, num_workers=workers)
    prepared = Sharded().prepare_loader(loader, Shard(world.rank, world.size), Feed(), None, 0)
    return [[batch.tolist() for batch in prepared] for _ in range(2)], generator.get_state()


def epochs_without_and_with_a_worker():
    return [epochs_with_generators_that_differ(workers) for workers in (0, 1)]


@pytest.mark.timeout(120)
def test_all_ranks_use_rank_zeros_generator():
    """All ranks get rank 0's state of a generator that the user handed in, once per iteration."""
    for (first, state), (second, other) in zip(*run_ranks(epochs_without_and_with_a_worker, 2), strict=True):
        expected = SubsetRandomSampler(range(10), generator=torch.Generator().manual_seed(10))
        for epoch in range(2):
            order = [i for step in zip(first[epoch], second[epoch], strict=True) for part in step for i in part]
            assert order[:10] == list(expected)
        assert torch.equal(state, other)


def orders_of_peers():
    """Two ranks that hold pieces of one model: both read all of the data."""
    world = World.current(cpu=True)
    sampler = SubsetRandomSampler(range(10), generator=torch.Generator().manual_seed(10 + world.rank))
    prepared = Sharded().prepare_loader(DataLoader(range(10), sampler=sampler), Shard(0, 1), Feed(), None, 0)
    return [batch.item() for batch in prepared]


@pytest.mark.timeout(120)
def test_ranks_that_read_the_same_part_read_it_in_the_same_order():
    first, second = run_ranks(orders_of_peers, 2)
    assert first == second == list(SubsetRandomSampler(range(10), generator=torch.Generator().manual_seed(10)))


def gathered_samples(workers, options, drop_last):
    accelerator = Accelerator(cpu=True, **options)
    loader = DataLoader(range(11), batch_size=4, num_workers=workers, drop_last=drop_last)
    prepared = accelerator.prepare(loader)
    return [accelerator.gather_for_metrics(batch).tolist() for batch in prepared]


CASES = (
    ((0, {}, False), [[0, 1, 2, 3, 4, 5, 6, 7], [8, 9, 10]]),
    ((2, {}, False), [[0, 1, 2, 3, 4, 5, 6, 7], [8, 9, 10]]),
    ((2, {"split_batches": True}, False), [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10]]),
    ((0, {"split_batches": True}, True), [[0, 1, 2, 3], [4, 5, 6, 7]]),
)


def gathered_samples_of_all_cases():
    return [gathered_samples(*case) for case, _ in CASES]


@pytest.mark.timeout(120)
def test_metrics_count_every_sample_once_and_in_order():
    """On two ranks, one collective a batch."""
    expected = [samples for _, samples in CASES]
    assert run_ranks(gathered_samples_of_all_cases, 2) == [expected, expected]


def joined_training(even_batches):
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.arange(10, dtype=torch.float32)[:, None]
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=2))
    seen = []
    with accelerator.join_uneven_inputs([model], even_batches=even_batches):
        for batch in loader:
            accelerator.backward(model(batch).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            seen += batch.flatten().int().tolist()
    inside, after = len(seen), len(list(loader))
    return seen, inside, after, [parameter.detach().tolist() for parameter in model.parameters()]


def joined_training_uneven_and_even():
    return [joined_training(even_batches) for even_batches in (False, None)]


@pytest.mark.timeout(120)
def test_ranks_that_join_may_end_at_different_batches():
    """The loader has one batch more on rank 0; behind the block it fills up again."""
    (first, evenly), (second, evenly_too) = run_ranks(joined_training_uneven_and_even, 2)
    assert first[0] == [0, 1, 4, 5, 8, 9]
    assert second[0] == [2, 3, 6, 7]
    assert first[2] == second[2] == 3
    assert first[3] == second[3]
    assert evenly_too[0] == [2, 3, 6, 7, 0, 1]
    assert evenly[3] == evenly_too[3]


def gathered_late(size, dispatch):
    accelerator = Accelerator(cpu=True, dispatch_batches=dispatch)
    loader = accelerator.prepare(DataLoader(torch.arange(size), batch_size=2))
    kept = list(loader)
    try:
        return [accelerator.gather_for_metrics(batch).tolist() for batch in kept]
    except (ValueError, CollectiveMismatchError) as error:  # the latter on a rank whose own batch is full
        return str(error)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("dispatch", [False, True])
def test_after_a_loop_that_was_filled_up_nothing_is_gathered_for_metrics(dispatch):
    found = run_ranks(gathered_late, 2, 5, dispatch)
    assert all(
        "Call gather_for_metrics once per batch, inside the loop over the prepared loader." in each for each in found
    )
    late = "gather_for_metrics was called after the loop over a prepared loader had ended, whose last batch on this rank was filled up."
    assert any(
        late in each for each in found
    )  # where it was not, the kept batch has another size, or another rank says it
    assert run_ranks(gathered_late, 2, 8, dispatch) == [[[0, 1, 2, 3], [4, 5, 6, 7]]] * 2
    assert run_ranks(gathered_late, 1, 5, dispatch) == [[[0, 1], [2, 3], [4]]]
