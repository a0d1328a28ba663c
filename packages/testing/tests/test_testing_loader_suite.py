"""The conformance suite of loaders: a right loader passes, and wrong ones are caught by exactly the tests that should."""

from __future__ import annotations

import inspect
from functools import cache

import pytest
import wrong_loaders as wrong
from covering import sampled

from accel_testing import LoaderSuite

TESTS = {name for name in dir(LoaderSuite) if name.startswith("test_")}

COUNTED = "test_every_sample_is_counted_once"
SINGLES = "test_batches_of_one_sample_are_divided"
VARYING = "test_batches_of_varying_sizes_lose_nothing"
STREAMS = "test_an_iterable_dataset_is_read_once"
IN_ORDER = "test_metrics_come_in_the_order_of_one_process"
EVEN = "test_all_ranks_have_equally_many_batches"
SHUFFLED = "test_shuffling_gives_each_epoch_an_order_of_its_own"
ANY_COUNT = "test_the_order_is_the_same_for_any_number_of_shards"
SET_EPOCH = "test_set_epoch_repeats_an_epoch"
WORKERS = "test_workers_change_nothing_that_is_read"
KEPT = "test_the_users_loader_is_kept_and_left_alone"
SURROUNDINGS = "test_preparing_leaves_the_surroundings_alone"
COPIES = "test_copies_read_what_the_loader_reads"
GOES_ON = "test_a_run_goes_on_where_its_state_was_taken"
YIELDED = "test_a_state_counts_what_was_yielded"
DRAWS = "test_workers_draw_by_shard_and_epoch"
SAMPLER = "test_a_sampler_of_the_users_own_is_followed_or_refused"
STATES = "test_each_state_of_an_epoch_is_right"
SKIPPED = "test_skipped_batches_are_left_out"
CARRIED = "test_a_state_loads_into_any_number_of_shards"  # compares divided runs with undivided ones

CAUGHT_BY = {
    wrong.Right: set(),
    wrong.DropsTheTail: {COUNTED, SINGLES, CARRIED},
    wrong.CountsPadding: {COUNTED, SINGLES, VARYING, IN_ORDER, GOES_ON, STATES, CARRIED},
    wrong.ForgetsTheEpoch: {SHUFFLED},
    wrong.IgnoresTheNumber: {SHUFFLED},
    wrong.IgnoresTheSeed: {SHUFFLED},
    wrong.DrawsGlobally: {
        SURROUNDINGS,  # a loader is asked for its length when it is prepared
        "test_the_order_depends_on_seed_and_epoch_alone",
        SET_EPOCH,
        COPIES,
        GOES_ON,
        STATES,
        SKIPPED,
    },
    wrong.OrderDependsOnTheShard: {SHUFFLED, ANY_COUNT, WORKERS, CARRIED},
    wrong.OrderDependsOnTheCount: {ANY_COUNT, CARRIED},
    wrong.ReadsEverything: {
        COUNTED,
        SINGLES,
        VARYING,
        IN_ORDER,
        "test_a_dropped_tail_is_less_than_a_global_batch",
        SHUFFLED,
        ANY_COUNT,
        WORKERS,
        DRAWS,
        SAMPLER,
        CARRIED,
    },
    wrong.ReadsByRank: {"test_ranks_of_one_shard_read_the_same", ANY_COUNT, DRAWS, CARRIED},
    wrong.Reverses: {IN_ORDER, ANY_COUNT, SAMPLER, CARRIED},
    wrong.ReadsUnevenly: {EVEN, SINGLES, CARRIED},
    wrong.SaysTheWrongLength: {"test_len_is_the_number_of_batches", SKIPPED},
    # With workers torch's batches are then too few, which PreparedLoader itself notices.
    wrong.DoesNotReportTheEnd: {"test_windows_of_accumulation_end_with_the_epoch", KEPT, WORKERS, DRAWS},
    wrong.RepeatsAcrossWorkers: {WORKERS},
    wrong.LosesPersistentEpochs: {WORKERS},
    wrong.ChangesDtypes: {"test_batches_keep_their_structure_on_the_device"},
    wrong.ChangesTheUsersLoader: {KEPT},
    wrong.LosesTheClass: {KEPT},
    wrong.SeedsTheUsersStream: {SURROUNDINGS},
    wrong.SetsTheEnvironment: {SURROUNDINGS},
    wrong.CountsWhatWasFetched: {YIELDED},
    wrong.CountsOwnSamples: {GOES_ON, STATES, YIELDED, CARRIED},
    wrong.IgnoresTheState: {GOES_ON, STATES, YIELDED, CARRIED},
    wrong.TakesEveryState: {"test_a_state_of_another_dataset_is_refused"},
    wrong.RepeatsTheRest: {GOES_ON, STATES, SKIPPED, YIELDED, CARRIED},
    wrong.PreparesTwice: {"test_a_prepared_loader_is_not_prepared_again"},
    wrong.CopiesStartElsewhere: {COPIES},
    wrong.KeepsLoadersAlive: {"test_nothing_is_kept_alive"},
    wrong.SwallowsErrors: {"test_an_error_of_the_dataset_reaches_the_loop"},
    wrong.LosesGrowingBatches: {VARYING},
    wrong.IgnoresSetEpoch: {SET_EPOCH},
    wrong.DrawsAlikeOnAllRanks: {DRAWS},
    wrong.DrawsAlikeInAllEpochs: {DRAWS},
    wrong.DrawsByRank: {DRAWS},
    wrong.FollowsNoSampler: {SAMPLER},
    wrong.ShufflesEverything: {SAMPLER},
    wrong.SkipsNothing: {SKIPPED},
    wrong.SkipsFromTheState: {SKIPPED},
    wrong.SkipsBesideTheEpochs: {SKIPPED},
    wrong.KeepsTheFirstState: {STATES},
    wrong.CountsFromTheResumption: {STATES},
    wrong.LoadsOnlyIntoNewLoaders: {STATES},
    wrong.RaisesOnOneRank: {SINGLES},
}


class TestRight(LoaderSuite):
    loader = wrong.Right
    lacks = {STREAMS: "it divides indices, and a stream has none"}


@cache
def failures_of(loader):
    """What the tests that catch a loader say, by their names; the ranks of a suite are launched once for all of its tests."""
    patience = 6.0 if loader is wrong.RaisesOnOneRank else 12.0  # the other rank waits until it is over
    suite = type("TestIt", (LoaderSuite,), {"loader": loader, "worlds": (2,), "patience": patience})
    found = {}
    for name in sorted(TESTS):
        test = getattr(suite(), name)
        try:
            test(*([2] if "world" in inspect.signature(test).parameters else []))
        except AssertionError as error:
            found[name] = str(error)
    return found


@pytest.mark.parametrize("loader", sampled(CAUGHT_BY), ids=lambda loader: loader.__name__)
def test_a_wrong_loader_is_caught_by_exactly_the_tests_that_should(loader):
    assert failures_of(loader).keys() == CAUGHT_BY[loader] | {STREAMS}


def test_every_wrong_loader_stands_in_the_table():
    defined = {kind for kind in vars(wrong).values() if isinstance(kind, type) and issubclass(kind, wrong.Right)}
    assert defined == CAUGHT_BY.keys()


def test_every_test_of_the_suite_catches_somebody():
    """Declarations have tests below; what no index reaches is what none of these loaders can do."""
    caught = set().union(*CAUGHT_BY.values())
    assert TESTS - caught == {"test_the_declarations_hold", STREAMS}


@pytest.mark.full(group="suites")
@pytest.mark.parametrize(
    ("loader", "test", "message"),
    [
        (wrong.DropsTheTail, COUNTED, "should count each of 13 samples once. Missing: [12], repeated: []"),
        (wrong.ReadsUnevenly, EVEN, "the ranks have [4, 3] batches. Fill up, or drop on every rank"),
        (wrong.ForgetsTheEpoch, SHUFFLED, "epoch 0 and epoch 1 have the same order on rank 0"),
        (wrong.RepeatsTheRest, GOES_ON, "A state taken after 1 batch, loaded on rank 0, is followed by the iterations"),
        (
            wrong.TakesEveryState,
            "test_a_state_of_another_dataset_is_refused",
            "led to nothing on rank 0. Keep the length",
        ),
        (wrong.LosesTheClass, KEPT, "this does not hold: the prepared loader is one of the user's class"),
    ],
)
def test_a_failure_says_what_came_and_what_to_do(loader, test, message):
    assert message in failures_of(loader)[test]
