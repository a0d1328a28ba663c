"""Streams that end at different batches on different ranks."""

from __future__ import annotations

import pytest

from accel_core import World
from accel_core.api.component import gather_objects
from accel_data.uneven_streams import even_ends
from accel_testing.ranks import run_ranks

pytestmark = pytest.mark.timeout(120)

LENGTHS = (5, 3, 0)


def own_batches(world, epoch=0):
    """(rank, number, epoch) of each batch."""
    return ({"id": (world.rank, number, epoch)} for number in range(LENGTHS[world.rank]))


def ends_on_all_ranks():
    """By policy and look-ahead, what this rank gets; with a collective of its own in every step of the agreed ones."""
    world = World.current(cpu=True)
    results = {}
    for policy in ("pad", "stop", "join"):
        for ahead in (1, 2, 4, 9):
            received = []
            for batch, is_real, remaining in even_ends(own_batches(world), policy, world, ahead=ahead):
                received.append((batch["id"][:2], is_real, remaining))
                batch.clear()  # as loops do that take their batch apart
                if policy != "join":
                    assert gather_objects([len(received)], world) == [len(received)] * 3
            results[policy, ahead] = received
    return results


def stopped_with_one_that_has_some():
    world = World.current(cpu=True)
    lengths = (5, 3, 4)
    return [list(even_ends(iter(range(lengths[world.rank])), "stop", world, ahead=ahead)) for ahead in (1, 2, 4)]


def epochs_that_are_broken_out_of():
    world = World.current(cpu=True)
    seen, kept = [], []
    for epoch in range(3):
        iterator = even_ends(own_batches(world, epoch), "pad", world)
        kept.append(iterator)  # a loop variable that outlives its loop
        for number, (batch, is_real, _) in enumerate(iterator):
            seen.append((batch["id"], is_real))
            if epoch < 2 and number == 1:
                break
        if epoch == 1:
            iterator.close()
    return seen


def failing_at(rank, number, world):
    for batch in own_batches(world):
        if (world.rank, batch["id"][1]) == (rank, number):
            raise LookupError(f"no file for sample {number}")
        yield batch


def errors_of_a_dataset():
    """What each rank sees of an error of rank 1, at its beginning and later, and of the epoch behind it."""
    world = World.current(cpu=True)
    errors = []
    for policy, number in (("pad", 0), ("pad", 2), ("stop", 0)):
        with pytest.raises((LookupError, RuntimeError)) as caught:
            for _ in even_ends(failing_at(1, number, world), policy, world):
                pass
        errors.append((type(caught.value).__name__, str(caught.value)))
    return errors, len(list(even_ends(own_batches(world), "pad", world)))


def in_a_pair():
    """Ranks 1 and 2 agree among themselves, in a group of their own, while rank 0 is elsewhere."""
    world = World.current(cpu=True)
    group = world.subgroup([1, 2])
    if world.rank == 0:
        return None
    return [batch["id"] for batch, _, _ in even_ends(own_batches(world), "pad", world, group)]


JOBS = (
    ends_on_all_ranks,
    stopped_with_one_that_has_some,
    epochs_that_are_broken_out_of,
    errors_of_a_dataset,
    in_a_pair,
)


def all_jobs():
    """One after the other, in one launch: each leaves the ranks as it found them."""
    return {job: job() for job in JOBS}


@pytest.fixture(scope="module")
def seen():
    """By job, what each rank saw."""
    by_rank = run_ranks(all_jobs, 3)
    return {job: [found[job] for found in by_rank] for job in JOBS}


def test_ranks_end_as_the_policy_says_and_know_how_many_batches_follow(seen):
    """5, 3 and 0 batches. What follows is exact for the last `ahead` batches, for all ranks together."""
    ranks = seen[ends_on_all_ranks]
    for ahead in (1, 2, 4, 9):
        following = [min(remaining, ahead) for remaining in (4, 3, 2, 1, 0)]
        expected = (
            [(0, 0), (0, 1), (0, 2), (0, 3), (0, 4)],
            [(1, 0), (1, 1), (1, 2), (1, 0), (1, 1)],
            [(0, 0)] * 5,
        )
        for rank, length in enumerate(LENGTHS):
            assert ranks[rank]["pad", ahead] == [
                (batch, number < length, remaining)
                for number, (batch, remaining) in enumerate(zip(expected[rank], following, strict=True))
            ]
            assert ranks[rank]["stop", ahead] == []
            assert ranks[rank]["join", ahead] == [
                ((rank, number), True, min(length - number - 1, ahead)) for number in range(length)
            ]


def test_all_stop_with_the_first(seen):
    for rank in seen[stopped_with_one_that_has_some]:
        assert rank == [[(number, True, min(2 - number, ahead)) for number in range(3)] for ahead in (1, 2, 4)]


def test_leaving_a_loop_early_does_not_disturb_the_next_epoch(seen):
    first, second, third = seen[epochs_that_are_broken_out_of]
    assert [identity for identity, _ in first] == [
        *[(0, number, 0) for number in range(2)],
        *[(0, number, 1) for number in range(2)],
        *[(0, number, 2) for number in range(5)],
    ]
    assert [is_real for _, is_real in second] == [True] * 4 + [True] * 3 + [False] * 2
    assert [identity for identity, _ in third] == [(0, 0, 0)] * 2 + [(0, 0, 1)] * 2 + [(0, 0, 2)] * 5


def test_an_error_of_one_dataset_ends_all_ranks(seen):
    ranks = seen[errors_of_a_dataset]
    assert [length for _, length in ranks] == [5, 5, 5]
    raised = [f"no file for sample {number}" for number in (0, 2, 0)]
    assert ranks[1][0] == [("LookupError", message) for message in raised]
    for errors, _ in (ranks[0], ranks[2]):
        assert [kind for kind, _ in errors] == ["RuntimeError"] * 3
        for (_, message), reason in zip(errors, raised, strict=True):
            assert f"another rank failed, and so all ranks end: rank 1 raised LookupError: {reason}. Mend" in message


def test_a_group_agrees_without_the_others(seen):
    own = [(1, 0, 0), (1, 1, 0), (1, 2, 0)]
    assert seen[in_a_pair] == [None, own, [(1, 0, 0)] * 3]


def test_one_process_has_nobody_to_agree_with():
    world = World.current(cpu=True)
    for policy in ("pad", "stop", "join"):
        assert list(even_ends([1, 2, 3], policy, world)) == [(1, True, 1), (2, True, 1), (3, True, 0)]
