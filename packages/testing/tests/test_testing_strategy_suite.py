"""The conformance suite of strategies: our own pass it, and wrong ones are caught by exactly the tests that should."""

from __future__ import annotations

import inspect

import pytest
import wrong_strategies as wrong
from covering import sampled

from accel_core import DDP
from accel_testing import StrategySuite, strategy_suite
from accel_testing.models import Net, built, gradients


class TestSingle(StrategySuite):
    strategy = "single"
    worlds = (1,)


class TestDDP(StrategySuite):
    strategy = "ddp"
    worlds = (2,)


def in_copies():
    return DDP(gradient_as_bucket_view=False, bucket_cap_mb=0.0001)


class TestDDPInCopies(StrategySuite):
    strategy = in_copies
    worlds = (2,)


TESTS = {name for name in dir(StrategySuite) if name.startswith("test_")}
EXIT = "test_the_process_exits_cleanly"

GRADIENTS = {
    "test_a_gradient_is_that_of_the_global_batch",
    "test_a_window_is_one_big_batch",
    "test_a_window_synchronised_at_each_micro_batch_is_one_big_batch",
    "test_a_window_by_hand_is_one_big_batch",
    "test_several_backwards_of_one_forward_add_up",
    "test_gradients_held_back_arrive_with_the_next_synchronised_backward",
    "test_trigger_sync_in_backward_synchronises",
    "test_forward_backward_weighs_what_batches_hold",
    "test_ranks_may_have_different_numbers_of_micro_batches",
    "test_training_is_that_of_one_process",
    "test_any_order_of_preparing_trains",
    "test_clipping_gives_the_norm_of_one_process",
    "test_an_error_inside_no_sync_ends_it",
    "test_two_optimizers_of_one_model_train",
    "test_several_models_train_side_by_side",
    "test_tied_parameters_stay_tied",
}
SAME = "test_all_ranks_hold_the_same_parameters"
NO_SYNC = "test_no_sync_keeps_gradients_local"
UNEVEN = "test_ranks_may_have_different_numbers_of_micro_batches"
POLICY = "test_a_policy_holds_or_is_refused"

CAUGHT_BY = {
    wrong.Right: set(),
    wrong.ForgetsAveraging: GRADIENTS | {SAME, POLICY},
    wrong.AveragesTwice: GRADIENTS,
    wrong.Sums: GRADIENTS | {POLICY},
    wrong.AveragesOnlyTheFirstModel: {"test_several_models_train_side_by_side"},
    wrong.IgnoresNoSync: {NO_SYNC, UNEVEN},
    wrong.DecidesAtTheBackward: {NO_SYNC},
    wrong.IgnoresTheTrigger: {"test_trigger_sync_in_backward_synchronises"},
    wrong.SumsEachMicroBatchOfAWindow: {
        "test_a_window_is_one_big_batch",
        NO_SYNC,
        "test_gradients_held_back_arrive_with_the_next_synchronised_backward",
        "test_forward_backward_weighs_what_batches_hold",
        UNEVEN,
        "test_training_is_that_of_one_process",
    },
    wrong.DropsTheShortWindow: {
        "test_a_window_is_one_big_batch",
        "test_a_window_synchronised_at_each_micro_batch_is_one_big_batch",
        "test_training_is_that_of_one_process",
        SAME,
    },
    wrong.IgnoresTheWeight: {
        "test_a_window_is_one_big_batch",
        "test_a_window_synchronised_at_each_micro_batch_is_one_big_batch",
        "test_a_window_by_hand_is_one_big_batch",
        "test_forward_backward_weighs_what_batches_hold",
        UNEVEN,
        "test_training_is_that_of_one_process",
    },
    wrong.IgnoresBackwardOptions: {"test_several_backwards_of_one_forward_add_up"},
    wrong.ReplacesParameters: TESTS
    - {
        EXIT,  # is not run
        POLICY,  # counts as a refusal
        "test_the_declarations_hold",
        "test_every_part_of_the_data_is_read_once",
        "test_training_starts_from_the_weights_of_rank_0",
        "test_preparing_leaves_the_surroundings_alone",
        "test_a_model_that_is_not_trained_can_be_called",
        "test_unwrapping_gives_the_users_model",
        "test_preparing_twice_is_preparing_once",
    },
    wrong.BreaksTies: {"test_tied_parameters_stay_tied"},
    wrong.WrapsInside: TESTS  # every comparison is one by name
    - {
        EXIT,
        SAME,
        POLICY,
        "test_the_declarations_hold",
        "test_every_part_of_the_data_is_read_once",
        "test_preparing_leaves_the_surroundings_alone",
        "test_clipping_in_an_open_window_touches_nothing",
        "test_a_model_that_is_not_trained_can_be_called",
        "test_preparing_twice_is_preparing_once",
        "test_nothing_is_kept_alive",
    },
    wrong.RenamesTheClass: {"test_unwrapping_gives_the_users_model"},
    wrong.WrapsWhatIsNotTrained: {"test_a_model_that_is_not_trained_can_be_called"},
    wrong.KeepsEachRanksWeights: {"test_training_starts_from_the_weights_of_rank_0"},
    wrong.KeepsEachRanksFrozenParts: {"test_training_starts_from_the_weights_of_rank_0"},
    wrong.KeepsEachRanksBuffers: {"test_training_starts_from_the_weights_of_rank_0"},
    wrong.StaysInNoSync: {"test_an_error_inside_no_sync_ends_it"},
    wrong.StepsTheFirstGroup: {
        "test_training_is_that_of_one_process",
        "test_any_order_of_preparing_trains",
        "test_two_optimizers_of_one_model_train",
        "test_several_models_train_side_by_side",
        "test_tied_parameters_stay_tied",
    },
    wrong.RepointsTheFirstOptimizer: {"test_two_optimizers_of_one_model_train"},
    wrong.GivesEveryRankTheSameShard: {"test_every_part_of_the_data_is_read_once"} | GRADIENTS,
    wrong.ClipsPerRank: {"test_clipping_gives_the_norm_of_one_process"},
    wrong.IgnoresTheNormType: {"test_clipping_gives_the_norm_of_one_process"},
    wrong.ScalesSmallGradientsUp: {"test_clipping_gives_the_norm_of_one_process"},
    wrong.IgnoresThePolicy: {POLICY},
    wrong.IgnoresTheReduceDtype: {POLICY},
    wrong.ResetsBuffers: {"test_buffers_live"},
    wrong.SeedsTheUsersStream: {"test_preparing_leaves_the_surroundings_alone"},
    wrong.SetsTheEnvironment: {"test_preparing_leaves_the_surroundings_alone"},
    wrong.KeepsModelsAlive: {"test_nothing_is_kept_alive"},
    wrong.AbortsAtExit: {EXIT},
    wrong.RaisesOnOneRank: {  # in an open window the norm is asked for
        "test_clipping_gives_the_norm_of_one_process",
        "test_clipping_in_an_open_window_touches_nothing",
    },
}
GETS_STUCK = {wrong.SumsEachMicroBatchOfAWindow, wrong.IgnoresNoSync, wrong.RaisesOnOneRank}
"""Some ranks wait in a collective that others never come to, until the patience of the suite is over."""
NEEDS_A_LAUNCH = {wrong.Right, wrong.AbortsAtExit}  # the test of exiting costs one more, so it runs for these only


def suite_of(factory, **attributes):
    return type("TestIt", (StrategySuite,), {"strategy": factory, "worlds": (2,), **attributes})


def failures(suite, tests):
    found = {}
    for name in sorted(tests):
        test = getattr(suite(), name)
        try:
            test(*([2] if "world" in inspect.signature(test).parameters else []))
        except AssertionError as error:
            found[name] = str(error)
    return found


@pytest.mark.parametrize("strategy", sampled(CAUGHT_BY), ids=lambda strategy: strategy.__name__)
def test_a_wrong_strategy_is_caught_by_exactly_the_tests_that_should(strategy):
    tests = TESTS if strategy in NEEDS_A_LAUNCH else TESTS - {EXIT}
    suite = suite_of(strategy, patience=10.0 if strategy in GETS_STUCK else 12.0)
    assert failures(suite, tests).keys() == CAUGHT_BY[strategy]


def test_every_wrong_strategy_stands_in_the_table():
    defined = {kind for kind in vars(wrong).values() if isinstance(kind, type) and issubclass(kind, wrong.Right)}
    assert defined == CAUGHT_BY.keys()


def test_every_test_of_the_suite_catches_somebody():
    """But for two: the core itself keeps what one proves, whatever a strategy does, and declarations have tests below."""
    kept_by_the_core = {"test_preparing_twice_is_preparing_once"}
    broad = {wrong.ReplacesParameters, wrong.WrapsInside}
    caught = set().union(*(tests for strategy, tests in CAUGHT_BY.items() if strategy not in broad))
    assert TESTS - caught == kept_by_the_core | {"test_the_declarations_hold"}


def test_a_failure_says_how_far_off_a_gradient_is():
    right = gradients_of_a_net()
    halved = {name: gradient / 2 for name, gradient in right.items()}
    with pytest.raises(
        AssertionError, match=r"it: backbone\.weight is off by 5\.0e-01, being 0\.5 times what it should be"
    ):
        strategy_suite.compare(halved, right, "it", "Rule")


def gradients_of_a_net():
    net = built(Net)
    sum(parameter.sum() for parameter in net.parameters()).backward()
    return gradients(net)
