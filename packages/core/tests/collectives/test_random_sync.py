"""Random streams that ranks share: which become equal, and which are left alone."""

from __future__ import annotations

import random
import warnings

import pytest
import torch
from together import Together

from accel_core.base.errors import CollectiveMismatchError
from accel_core.collectives.random_sync import synchronize_random_states
from accel_core.processes.world import World
from accel_testing import run_ranks

ON_TWO = Together(2)


def seed_by_rank(world):
    torch.manual_seed(100 + world.rank)
    random.seed(100 + world.rank)
    return torch.Generator().manual_seed(200 + world.rank), torch.Generator().manual_seed(300 + world.rank)


def next_draws(*generators):
    """What every stream would give next; none of them is moved."""
    states = [generator.get_state() for generator in generators]
    torch_state, python_state = torch.get_rng_state(), random.getstate()
    drawn = {
        "torch": torch.rand(()).item(),
        "python": random.random(),
        "given": [torch.rand((), generator=generator).item() for generator in generators],
    }
    torch.set_rng_state(torch_state)
    random.setstate(python_state)
    for generator, state in zip(generators, states, strict=True):
        generator.set_state(state)
    return drawn


def streams_before_and_after(rng_types):
    world = World.current(cpu=True)
    generators = seed_by_rank(world)
    before = next_draws(*generators)
    synchronize_random_states(rng_types, generators, world)
    return before, next_draws(*generators)


def every_case(cases):
    return [streams_before_and_after(case) for case in cases]


CASES = {
    "nothing": [],
    "torch": ["torch"],
    "generator": ["generator"],
    "both": ["generator", "torch"],
}
SHARED = {
    "nothing": set(),
    "torch": {"torch"},
    "generator": {"given"},
    "both": {"torch", "given"},
}


@pytest.fixture(scope="module")
def outcome():
    first, second = run_ranks(every_case, 2, list(CASES.values()))
    return dict(zip(CASES, zip(first, second, strict=True), strict=True))


@pytest.mark.parametrize("case", CASES)
def test_what_is_named_becomes_rank_zeros_and_all_else_goes_on(outcome, case):
    (before, after), (before_second, after_second) = outcome[case]
    assert after == before, "rank 0's streams stay where they were"
    for stream in ("torch", "python", "given"):
        assert before[stream] != before_second[stream]
        assert after_second[stream] == (before if stream in SHARED[case] else before_second)[stream]


@ON_TWO
def collectives_made():
    """How many messages the channel of the world has exchanged for each case."""
    from accel_core.collectives.reduce_gather import channel_of

    world = World.current(cpu=True)
    generators = seed_by_rank(world)
    channel = channel_of(world, None)
    exchange, calls = channel.exchange, []
    channel.exchange = lambda *arguments: calls.append(arguments) or exchange(*arguments)
    counts = []
    for rng_types, given in [([], generators), (["generator"], []), (["generator", "torch"], generators)]:
        calls.clear()
        synchronize_random_states(rng_types, given, world)
        counts.append(len(calls))
    return counts


def test_there_is_one_collective_for_all_and_none_for_nothing():
    assert ON_TWO.run(collectives_made) == [[0, 0, 1]] * 2


@ON_TWO
def warnings_given():
    world = World.current(cpu=True)
    generators = seed_by_rank(world)
    before = next_draws(*generators)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(3):  # one line, so that it is the same warning three times
            synchronize_random_states(["cuda"], generators, world)
    return [str(warning.message) for warning in caught], next_draws(*generators) == before


def test_a_device_that_is_not_in_use_is_warned_of_once_and_changes_nothing():
    for messages, unchanged in ON_TWO.run(warnings_given):
        assert unchanged
        assert len(messages) == 1
        assert messages[0].startswith(
            "rng_types has 'cuda', but this run trains on 'cpu': it has no effect here. Leave it"
        )


@ON_TWO
def refused():
    world = World.current(cpu=True)
    generators = seed_by_rank(world)
    before = next_draws(*generators)
    try:
        synchronize_random_states(["generator"], generators[: world.rank + 1], world)
    except CollectiveMismatchError as error:
        return str(error), next_draws(*generators) == before
    return "fine", False


def test_ranks_with_different_numbers_of_generators_are_all_told():
    first, second = ON_TWO.run(refused)
    assert first == second
    message, unchanged = first
    assert unchanged
    assert "rank 0: synchronize_rng_states: dict('generator': list(*))" in message
    assert "rank 1: synchronize_rng_states: dict('generator': list(*, *))" in message
    assert message.endswith("and pass equally many generators there, or samplers that have one.")


def test_alone_nothing_is_to_be_made_equal():
    world = World.current(cpu=True)
    generator = torch.Generator().manual_seed(1)
    before = next_draws(generator)
    synchronize_random_states(["torch", "generator"], [generator], world)
    assert next_draws(generator) == before
