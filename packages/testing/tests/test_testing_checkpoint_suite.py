"""The conformance suite of checkpoints: our own strategies pass it, and wrong ones are caught by exactly the tests that should."""

from __future__ import annotations

import inspect

import pytest
import wrong_checkpoints as wrong
from covering import sampled
from sharded_strategies import Flat, Rows, Uneven

from accel_core import DDP
from accel_testing import CheckpointSuite


class TestSingle(CheckpointSuite):
    strategy = "single"
    worlds = (1,)


class TestDDP(CheckpointSuite):
    strategy = "ddp"
    worlds = (2,)


def in_views():
    return DDP(gradient_as_bucket_view=True, bucket_cap_mb=0.0001)


class TestDDPInViews(CheckpointSuite):
    strategy = in_views
    worlds = (2,)


class TestRows(CheckpointSuite):
    strategy = Rows


class TestUneven(CheckpointSuite):
    strategy = Uneven


class TestFlat(CheckpointSuite):
    strategy = Flat


TESTS = {name for name in dir(CheckpointSuite) if name.startswith("test_")}
TO_THE_BIT = "test_a_run_that_is_loaded_goes_on_to_the_bit"
WEIGHTS = "test_one_process_reads_the_weights_that_were_trained"
OPTIMIZER = "test_one_process_reads_the_optimizer_that_was_trained"
GOES_ON = "test_one_process_goes_on_with_what_was_saved"
TAKEN_OVER = "test_a_checkpoint_of_one_process_is_taken_over"
AGAIN = "test_what_is_taken_over_is_saved_as_it_was"
BUFFERS = "test_buffers_are_those_of_rank_0"
TIES = "test_ties_survive"
WINDOW = "test_an_open_window_is_saved_or_refused"
REFUSED = "test_the_state_of_another_optimizer_is_refused_before_anything_changes"

CAUGHT_BY = {
    wrong.Right: set(),
    wrong.ForgetsWhatItComputesWith: {TO_THE_BIT, TAKEN_OVER},
    wrong.FillsOnlyWhatItComputesWith: {TO_THE_BIT, TAKEN_OVER},
    wrong.BeginsEveryPartAtTheFirstRow: TESTS - {WINDOW, "test_the_declarations_hold"},
    wrong.ForgetsTheOptimizer: {TO_THE_BIT, OPTIMIZER, GOES_ON, AGAIN},
    wrong.ForgetsTheSecondGroup: {TO_THE_BIT, OPTIMIZER, GOES_ON, AGAIN},
    wrong.RestoresOptionsOfOneGroup: {TO_THE_BIT, TAKEN_OVER, AGAIN},
    wrong.RestoresNoOptions: {TO_THE_BIT, TAKEN_OVER, AGAIN},
    wrong.HasNamesOfItsOwn: {WEIGHTS, OPTIMIZER, GOES_ON, TAKEN_OVER, AGAIN, BUFFERS, TIES},
    wrong.FindsEverythingFitting: {REFUSED},
    wrong.KeepsTheBuffersOfEveryRank: {WEIGHTS, OPTIMIZER, GOES_ON, TAKEN_OVER, AGAIN, BUFFERS, TIES},
    wrong.LosesPendingGradients: {WINDOW},
    wrong.BreaksTies: {TO_THE_BIT, TAKEN_OVER, AGAIN, TIES},
}


def failures(strategy):
    suite = type("TestIt", (CheckpointSuite,), {"strategy": strategy, "worlds": (2,)})
    found = {}
    for name in sorted(TESTS):
        test = getattr(suite(), name)
        try:
            test(*([2] if "world" in inspect.signature(test).parameters else []))
        except AssertionError as error:
            found[name] = str(error)
    return found


@pytest.mark.parametrize("strategy", sampled(CAUGHT_BY), ids=lambda strategy: strategy.__name__)
def test_a_wrong_strategy_is_caught_by_exactly_the_tests_that_should(strategy):
    assert failures(strategy).keys() == CAUGHT_BY[strategy]


def test_every_wrong_strategy_stands_in_the_table_and_every_test_catches_somebody():
    defined = {kind for kind in vars(wrong).values() if isinstance(kind, type) and kind.__module__ == wrong.__name__}
    assert defined == CAUGHT_BY.keys()
    assert set().union(*CAUGHT_BY.values()) == TESTS - {"test_the_declarations_hold"}
