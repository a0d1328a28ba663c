"""Evaluation on any number of ranks counts every sample once, in the order of one process.

What is expected is computed here, from the size of the dataset and of the batches alone; only a shuffled order is taken from
a run of one process.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from functools import cache

import pytest
from evaluation_job import Case, Outcome, batches_of, outcomes, varying

from accel_testing import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore:The prepared .* has no batch on this rank")  # an empty loader is a case

WORLDS = [1, 2, 3, 4]
SAMPLED = 150
KINDS = ["number", "text", "record", "list", "ragged"]


def possible(case: Case, world: int) -> bool:
    """Whether torch can make such a loader, and the world share it out."""
    own = case.order in ("fixed", "varying", "sized")
    if (case.iterable and (case.order != "in turn" or case.workers)) or (own and case.drop_last):
        return False
    return not case.split or (case.order not in ("fixed", "varying") and case.batch % world == 0)


def product() -> Iterator[Case]:
    """Every case; the kinds of samples take turns."""
    flags = (False, True)
    kinds = itertools.cycle(KINDS)
    for samples, batch, order, drop_last, dispatch, iterable, split, even in itertools.product(
        range(1, 41),
        range(1, 9),
        ("in turn", "shuffled", "fixed", "varying", "sized"),
        flags,
        flags,
        flags,
        flags,
        flags,
    ):
        yield Case(samples, batch, order, drop_last, dispatch, iterable, split, even, next(kinds))


def sampled(world: int) -> list[Case]:
    """Cases drawn from the product, a few of them with workers; the same in every run."""
    draw = random.Random(world)
    cases: list[Case] = []
    while len(cases) < SAMPLED:
        order = draw.choice(["in turn", "in turn", "shuffled", "fixed", "varying", "sized"])
        flags = [draw.random() < 0.5 for _ in range(5)]
        workers = 2 if len(cases) % 30 == 7 else 0
        case = Case(draw.randint(1, 40), draw.randint(1, 8), order, *flags, draw.choice(KINDS), workers)
        if possible(case, world):
            cases.append(case)
    return cases


@cache
def shuffled_order(samples: int) -> list[int]:
    """The order of one process, which reads all in one batch."""
    [outcome] = outcomes([Case(samples, samples, order="shuffled")])
    assert sorted(outcome.read[0]) == list(range(samples))
    return outcome.read[0]


def expected_steps(case: Case, world: int) -> list[list[int]]:
    """The ids of each global step."""
    if case.order in ("in turn", "shuffled"):
        order = shuffled_order(case.samples) if case.order == "shuffled" else range(case.samples)
        size = case.batch if case.split else case.batch * world
        steps = [[order[i] for i in step] for step in batches_of(case.samples, [size])]
        return [step for step in steps if len(step) == size or not case.drop_last]
    lists = batches_of(case.samples, varying(case.batch) if case.order == "varying" else [case.batch])
    together = 1 if case.split else world
    return [list(itertools.chain(*lists[first : first + together])) for first in range(0, len(lists), together)]


def read_in_turn(ranks: list[Outcome]) -> list[int]:
    """What the ranks read, step by step, rank 0 first."""
    steps = itertools.zip_longest(*(outcome.read for outcome in ranks), fillvalue=())
    return [number for step in steps for part in step for number in part]


def length_is_a_bound(case: Case, outcome: Outcome) -> bool:
    """Whether the length need only be a bound: what the last batch of the user's own sampler holds nobody knows beforehand."""
    assert outcome.length is not None
    bounded = case.order == "sized" and case.may_end_apart and (case.split or case.dispatch)
    return bounded and outcome.length == len(outcome.read) + 1


def faults(case: Case, ranks: list[Outcome]) -> list[str]:
    """What is wrong with the outcome of a case on all ranks, in words."""
    steps = expected_steps(case, len(ranks))
    everything = [number for step in steps for number in step]
    found = []
    for rank, outcome in enumerate(ranks):
        if not case.may_end_apart and outcome.gathered != steps:
            found.append(f"rank {rank} gathered {outcome.gathered} instead of {steps}")
        if outcome.length not in (None, len(outcome.read)) and not length_is_a_bound(case, outcome):
            found.append(f"rank {rank} has {len(outcome.read)} batches, its loader says {outcome.length}")
        if not case.iterable and case.order not in ("fixed", "varying") and outcome.length is None:
            found.append(f"rank {rank} does not know its length")
    if case.may_end_apart and len(ranks) > 1 and read_in_turn(ranks) != everything:
        found.append(f"the ranks read {read_in_turn(ranks)} instead of {everything}")
    return found


def assert_every_sample_counts_once(cases: list[Case], world: int, timeout: float) -> None:
    per_rank = [outcomes(cases)] if world == 1 else run_ranks(outcomes, world, cases, timeout=timeout)
    wrong = {case: faults(case, list(ranks)) for case, ranks in zip(cases, zip(*per_rank, strict=True), strict=True)}
    texts = [f"{case}\n    " + "\n    ".join(found) for case, found in wrong.items() if found]
    assert not texts, f"{len(texts)} of {len(cases)} cases:\n" + "\n".join(texts[:10])


@pytest.mark.parametrize(
    "world", [1, 2, pytest.param(3, marks=pytest.mark.full), pytest.param(4, marks=pytest.mark.full)]
)
def test_every_sample_is_counted_once_and_in_order(world: int) -> None:
    """A sample of the product."""
    assert_every_sample_counts_once(sampled(world), world, timeout=100)


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("world", WORLDS)
def test_every_sample_is_counted_once_in_the_whole_product(world: int) -> None:
    cases = [case for case in product() if possible(case, world)]
    for first in range(0, len(cases), 2000):
        assert_every_sample_counts_once(cases[first : first + 2000], world, timeout=1800)
