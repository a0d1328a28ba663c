"""What one stage of ZeRO saves, every other strategy loads, on any number of ranks; and goes on as one process would."""

from __future__ import annotations

import itertools

import pytest
import torch
from deepspeed_jobs import Run, all_saved_behind, legs, loaded_by, saved_by

from accel_testing import run_ranks

CHAIN = ["ddp", "zero3", "fsdp", "zero2"]
AT_ONE, AT_TWO = ["single", "zero3"], ["ddp", "fsdp", "zero1", "zero2", "zero3"]
TOLERANCE = 1e-6  # sums are taken in another order


def assert_same(found, expected, where, tolerance=0.0):
    """Weights up to an absolute difference, the schedule exactly."""
    weights, *schedule = found
    others, *planned = expected
    assert schedule == planned, where
    assert weights.keys() == others.keys(), where
    for name, value in others.items():
        assert weights[name].dtype == value.dtype, (where, name)
        torch.testing.assert_close(
            weights[name], value, rtol=0, atol=tolerance, msg=lambda text, name=name: f"{where} {name}: {text}"
        )


def uninterrupted(folder):
    """What one process is after each step."""
    run, found = Run("single"), []
    for number in range(len(CHAIN) + 1):
        run.train(number)
        found.append(run.state())
    return found


@pytest.fixture(scope="module")
def chain(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chain")
    two, _ = run_ranks(legs, 2, folder, CHAIN, 0, timeout=120)
    (one,) = run_ranks(legs, 1, folder, ["single"], len(CHAIN))
    (expected,) = run_ranks(uninterrupted, 1, folder)
    return two + one, expected


def test_a_run_that_moves_through_all_strategies_is_one_that_was_not_interrupted(chain):
    found, expected = chain
    for (strategy, loaded, trained), before, after in zip(found, [None, *expected], expected, strict=False):
        if before is not None:
            assert_same(loaded, before, f"loaded by {strategy}", TOLERANCE)
        assert_same(trained, after, f"trained by {strategy}", TOLERANCE)


def test_each_leg_finds_what_the_one_before_has_left_to_the_bit(chain):
    found, _ = chain
    for (_, _, left), (strategy, loaded, _) in itertools.pairwise(found):
        assert_same(loaded, left, strategy)


def test_a_save_behind_the_run_holds_the_moment_of_its_call(tmp_path):
    for rank in run_ranks(all_saved_behind, 2, tmp_path, timeout=120):
        for strategy, modes in rank.items():
            for mode, (then, loaded, after, again) in modes.items():
                assert_same(loaded, then, (strategy, mode))
                assert_same(again, after, (strategy, mode))


@pytest.mark.full
@pytest.mark.timeout(900)
def test_every_strategy_goes_on_with_what_every_other_has_saved(tmp_path):
    saved = {f"{name}@1": state for name, state in run_ranks(saved_by, 1, tmp_path, AT_ONE)[0].items()}
    saved |= {f"{name}@2": state for name, state in run_ranks(saved_by, 2, tmp_path, AT_TWO, timeout=120)[0].items()}
    (expected,) = run_ranks(uninterrupted, 1, tmp_path)
    for source, state in saved.items():
        assert_same(state, expected[1], source, TOLERANCE)
    for world, strategies in ((1, AT_ONE), (2, AT_TWO)):
        main, *others = run_ranks(loaded_by, world, tmp_path, strategies, list(saved), timeout=300)
        assert len(main) == len(strategies) * len(saved)
        for (strategy, source), (loaded, trained) in main.items():
            assert_same(loaded, saved[source], (strategy, world, source))
            assert_same(trained, expected[2], (strategy, world, source), TOLERANCE)
        for rank in others:  # which have the schedule, and the weights only where nothing is shared out
            for (strategy, source), (loaded, trained) in rank.items():
                assert loaded[1:] == saved[source][1:], (strategy, world, source)
                assert trained[1:] == expected[2][1:], (strategy, world, source)
