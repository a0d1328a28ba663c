"""The conformance suite of precisions: full precision passes it, and wrong ones are caught by exactly the tests that should."""

from __future__ import annotations

import inspect
import re

import pytest
import torch
import wrong_precisions as wrong

from accel_core import PrecisionPolicy
from accel_testing import precision_jobs, run_ranks
from accel_testing.precision_observations import Description, Explained, Refused
from accel_testing.precision_suite import PrecisionSuite, Setting
from accel_testing.shared_launch import Raised

TOLERANCES = {"tolerance": 1e-2, "gradient_tolerance": 3e-2}


class TestFullPrecision(PrecisionSuite):
    precision = "no"


class TestRight(PrecisionSuite):
    precision = wrong.Right
    strategies = (("single", 1), ("ddp", 2), (wrong.Refusing, 1))
    lacks = {"Refusing-1": "it computes in float32 only"}
    tolerance = TOLERANCES["tolerance"]
    gradient_tolerance = TOLERANCES["gradient_tolerance"]


TESTS = {name for name in dir(PrecisionSuite) if name.startswith("test_")}

DECLARED = "test_the_declarations_hold"
VALUE = "test_the_policy_is_a_value"
POLICY = "test_the_policy_holds_or_is_refused"
EVALUATED = "test_a_model_that_is_only_evaluated_obeys_the_policy"
SAME = "test_evaluating_computes_what_training_computes"
LOSSES = "test_losses_are_those_of_full_precision"
WINDOWS = "test_windows_of_accumulation_are_big_batches"
DOWN = "test_losses_go_down"
RANKS = "test_ranks_agree_to_the_bit"
FINITE = "test_a_finite_loss_never_skips_a_step"
LEFT_OUT = "test_a_step_that_overflows_on_one_rank_is_left_out_on_all"
SCHEDULE = "test_a_schedule_waits_while_steps_are_left_out"
GOES_ON = "test_training_goes_on_after_an_overflow"
CLIPPED = "test_clipping_sees_the_gradients_of_the_plain_loss"
UNSCALED = "test_unscaled_gradients_are_those_of_the_plain_loss"
TWICE = "test_unscaling_twice_is_unscaling_once"
TURNS = "test_optimizers_are_unscaled_each_for_itself"
EACH = "test_optimizers_overflow_each_for_itself"
OPEN = "test_in_an_open_window_nothing_is_unscaled"
RESUMED = "test_a_run_that_is_loaded_goes_on_to_the_bit"
REMEMBERED = "test_what_a_precision_remembers_is_loaded"
WEIGHTS = "test_weights_load_into_full_precision"
NAMES = "test_names_stay"
PICKLED = "test_a_model_without_the_casts_can_be_pickled"
TRAINS = "test_every_parameter_trains"
AUTOCAST = "test_autocast_gives_the_compute_dtype"
EXPLAINED = "test_explain_tells_what_holds"
BESIDE = "test_two_precisions_live_side_by_side"
FREED = "test_a_model_that_is_freed_is_the_users_again"
ALIVE = "test_nothing_is_kept_alive"

CAUGHT_BY = {
    wrong.Right: set(),
    wrong.DependsOnTheDay: {VALUE},
    wrong.CannotBePickled: {VALUE},
    wrong.CastsIntegers: {POLICY, EVALUATED},
    wrong.ForgetsTheOutput: {POLICY, EVALUATED},
    wrong.TravelsWhole: {POLICY},
    wrong.ForgetsTheInput: {POLICY, EVALUATED},
    wrong.IsRefused: TESTS - {DECLARED, VALUE, AUTOCAST},  # all that prepares a model
    wrong.ForgetsEvaluation: {EVALUATED},
    wrong.RoundsInTrainingOnly: {SAME, FREED},
    wrong.ComputesOnItsOwn: {POLICY, EVALUATED, FREED},
    wrong.SwitchesAutocastOn: {AUTOCAST, BESIDE},
    wrong.ConvertsForAll: {POLICY, EVALUATED, BESIDE},
    wrong.ComputesTooNarrowly: {LOSSES, WINDOWS, CLIPPED, UNSCALED, FREED},
    # A run that loads has copied other weights.
    wrong.DetachesParameters: {LOSSES, CLIPPED, UNSCALED, TRAINS, RESUMED},
    wrong.StaysWhenFreed: {FREED},
    wrong.WrapsModules: {CLIPPED, UNSCALED, NAMES, PICKLED, WEIGHTS, FREED},
    wrong.AddsBuffers: {NAMES, PICKLED, WEIGHTS, FREED},
    wrong.LeavesAFunctionOnTheModel: {PICKLED},
    wrong.NeverUnscalesBeforeClipping: {CLIPPED, UNSCALED},
    wrong.UnscalesAgain: {WINDOWS, DOWN, TURNS},
    wrong.UnscalesOneForAll: {TURNS},
    wrong.ForgetsOthersAtAStep: {TURNS},
    wrong.LooksAtTheFirstOptimizer: {EACH},
    # What is loaded, on all ranks, is what the first has saved.
    wrong.ScalesUnlikely: {RANKS, RESUMED, WEIGHTS},
    wrong.SkipsOnOneRank: {LEFT_OUT, SCHEDULE, GOES_ON, EACH, RESUMED},
    wrong.KeepsQuietAboutSkipping: {LEFT_OUT, SCHEDULE},
    wrong.StepsWithoutTheOverflow: {LEFT_OUT, EACH},
    wrong.NeverRecovers: {SCHEDULE, GOES_ON, EACH, RESUMED, REMEMBERED},
    wrong.SkipsNow: {LOSSES, FINITE, TURNS, EACH, RESUMED},
    wrong.NeverSteps: {LOSSES, WINDOWS, DOWN, GOES_ON, EACH, TRAINS},
    wrong.ForgetsItsState: {REMEMBERED},
    wrong.RemembersHalf: {RESUMED},
    wrong.SaysNothing: {EXPLAINED},
    wrong.KeepsModelsAlive: {ALIVE},
}


def examine(subjects):
    """For each subject what every job returned, or how it raised: one launch for all."""
    return [{job.__name__: outcome(job, subject) for job in precision_jobs.JOBS} for subject in subjects]


def outcome(job, subject):
    try:
        return job(subject)
    except Exception as error:
        return Raised.by(error)
    finally:
        subject.precision.undo()


class Suites(dict):
    """For each wrong precision a suite that has its facts already. Some share a launch; most are wrong on one rank as well."""

    def __init__(self, folder):
        super().__init__()
        self.folder = folder

    def __missing__(self, precision):
        world = precision.setting.world
        alike = [kind for kind in CAUGHT_BY if kind.setting.world == world]
        first = alike.index(precision) // TOGETHER * TOGETHER
        chosen = alike[first : first + TOGETHER]
        ranks = run_ranks(examine, world, [self.subject(kind) for kind in chosen], timeout=100)
        self.update((kind, suite_of(kind, seen)) for kind, *seen in zip(chosen, *ranks, strict=True))
        return self[precision]

    def subject(self, kind):
        folder = self.folder / kind.__name__
        folder.mkdir()
        return precision_jobs.PrecisionSubject(kind.setting.strategy, precision=kind, folder=str(folder))


TOGETHER = 10  # few launches, for they cost; and not one, because a test has only so much time on a busy machine


@pytest.fixture(scope="module")
def suites(tmp_path_factory):
    return Suites(tmp_path_factory.mktemp("precisions"))


def suite_of(kind, seen):
    attributes = {"precision": kind, "strategies": (kind.setting,), **TOLERANCES}
    suite = type("TestIt", (PrecisionSuite,), attributes)
    suite._launches = {kind.setting: {name: [rank[name] for rank in seen] for name in seen[0]}}
    return suite


def failures(suite, tests=TESTS):
    found = {}
    for name in sorted(tests):
        test = getattr(suite(), name)
        try:
            test(*(suite()._settings() if "setting" in inspect.signature(test).parameters else []))
        except AssertionError as error:
            found[name] = str(error)
    return found


@pytest.mark.full(group="suites")  # they share launches: a few of them would cost as much as a third of all
@pytest.mark.parametrize("precision", CAUGHT_BY, ids=lambda precision: precision.__name__)
def test_a_wrong_precision_is_caught_by_exactly_the_tests_that_should(precision, suites):
    assert failures(suites[precision]).keys() == CAUGHT_BY[precision]


def test_every_wrong_precision_stands_in_the_table():
    defined = {kind for kind in vars(wrong).values() if isinstance(kind, type) and issubclass(kind, wrong.Right)}
    assert defined == CAUGHT_BY.keys()


def test_every_test_of_the_suite_catches_somebody():
    """But for two: the core itself keeps what they prove, whatever a precision does, and declarations have tests below."""
    caught = set().union(*(tests for precision, tests in CAUGHT_BY.items() if precision is not wrong.IsRefused))
    assert TESTS - caught == {TWICE, OPEN, DECLARED}


@pytest.mark.full(group="suites")
@pytest.mark.parametrize(
    ("precision", "test", "message"),
    [
        (wrong.DependsOnTheDay, VALUE, "of another one that was made in the same way. It depends on options alone"),
        (wrong.CannotBePickled, VALUE, "or raise a TypeError that says why this precision cannot be"),
        (
            wrong.CastsIntegers,
            POLICY,
            "receives integers in: torch.float32, expected torch.int64 by the policy (compute",
        ),
        (wrong.ForgetsTheOutput, POLICY, "the model returns raw in: torch.bfloat16, expected torch.float32"),
        (wrong.TravelsWhole, POLICY, "gradients travelled in float32, expected torch.bfloat16"),
        (wrong.IsRefused, POLICY, "declare it: lacks = {'Refusing-1': 'the reason'}"),
        (
            wrong.RoundsInTrainingOnly,
            SAME,
            "What a trained model in eval() made of a batch under no_grad() on rank 0 is",
        ),
        (wrong.ComputesTooNarrowly, LOSSES, "and tolerance is 0.01"),
        (wrong.NeverSteps, DOWN, "that of the untrained model. Updates may be lost in"),
        (wrong.ScalesUnlikely, RANKS, "What a rank decides, all decide"),
        (wrong.SkipsNow, FINITE, "was [False, False, False, True, False, False] after steps with finite losses"),
        (wrong.SkipsOnOneRank, LEFT_OUT, "on rank 0 optimizer_step_was_skipped is False, where losses are scaled. Ask"),
        (wrong.KeepsQuietAboutSkipping, SCHEDULE, "the learning rates on rank 0 are [0.495, 0.49, 0.485]"),
        (wrong.NeverRecovers, GOES_ON, "skipped True, parameters changed False, finite True. Nothing of the overflow"),
        (wrong.NeverUnscalesBeforeClipping, UNSCALED, "is 1024 times as large as in full precision"),
        (wrong.NeverUnscalesBeforeClipping, CLIPPED, "The norm that clip_grad_norm_() returned on rank 0 is 389."),
        (wrong.WrapsModules, UNSCALED, "'head.0.bias', 'head.0.weight', 'shift'], not ['backbone.bias'"),
        (wrong.ForgetsItsState, REMEMBERED, "has the scale 1024 and the state None, expected 512 and None"),
        (wrong.ScalesUnlikely, WEIGHTS, "A checkpoint knows no precision"),
        (wrong.AddsBuffers, NAMES, "'backbone.largest'"),
        (wrong.LeavesAFunctionOnTheModel, PICKLED, "Nothing that cannot be pickled stays on the model"),
        (
            wrong.DetachesParameters,
            TRAINS,
            "together with its model two steps on rank 0 did not change backbone.weight.",
        ),
        (wrong.SwitchesAutocastOn, AUTOCAST, "autocast before it, is torch.bfloat16 on rank 0, expected torch.float32"),
        (wrong.SaysNothing, EXPLAINED, "details() is empty, and this is not full precision"),
        (wrong.ConvertsForAll, BESIDE, "Beside this precision, full precision has the mean losses"),
        (wrong.KeepsModelsAlive, ALIVE, "the user's model, the prepared model, a parameter still live on rank 0"),
    ],
)
def test_a_failure_says_what_came_and_what_to_do(precision, test, message, suites):
    (said,) = failures(suites[precision], {test}).values()
    assert message in said


@pytest.mark.full(group="suites")
def test_a_refusal_that_is_declared_has_to_come(suites):
    suite = type("TestIt", (suites[wrong.Right],), {"lacks": {"single-1": "it is slow there"}})
    suite._launches = suites[wrong.Right]._launches
    with pytest.raises(
        AssertionError, match=r"lacks names single-1 \(it is slow there\), and prepare\(\) took the model"
    ):
        suite().test_the_policy_holds_or_is_refused(Setting("single", 1))


def test_a_refusal_has_to_say_something():
    suite = type("TestIt", (PrecisionSuite,), {"precision": wrong.Right, "lacks": {"ddp-2": "it is slow there"}})
    suite._launches = {Setting("ddp", 2): {"observed": [Refused("no", "ValueError: no")] * 2}}
    with pytest.raises(AssertionError, match=r"refused the precision on rank 0 with 'no'\. Say what was asked"):
        suite().test_the_policy_holds_or_is_refused(Setting("ddp", 2))


FULL = PrecisionPolicy()


@pytest.mark.parametrize(
    ("test", "job", "fact", "message"),
    [
        (
            VALUE,
            "described",
            Description("bf16", "bf16", "bf16"),
            "policy is 'bf16', expected an accel_core.PrecisionPol",
        ),
        (VALUE, "described", Description(FULL, FULL, "bf16"), "A pickled copy has the policy bf16"),
        (EXPLAINED, "explained", Explained(False, {"policy": "bf16"}, "role"), "explain() does not show ['bf16']"),
        (WEIGHTS, "read_in_full", ({"x": torch.ones(1)}, {"x": torch.ones(1)}, float("nan")), "has the loss nan"),
    ],
)
def test_what_no_core_lets_happen_is_told_as_well(test, job, fact, message):
    suite = type("TestIt", (PrecisionSuite,), {"precision": wrong.Right})
    suite._launches = {Setting("single", 1): {job: [fact]}}
    with pytest.raises(AssertionError, match=re.escape(message)):
        getattr(suite(), test)(Setting("single", 1))


def declared(**attributes):
    type("TestIt", (PrecisionSuite,), {"precision": wrong.Right, **attributes})().test_the_declarations_hold()


def unsendable():
    return lambda: None


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"lacks": {"test_nothing_is_kept": "why"}}, "lacks names test_nothing_is_kept, which the suite does not have"),
        ({"lacks": {f"{ALIVE}[ddp-3]": "why"}}, f"lacks names {ALIVE}[ddp-3], which the suite does not have"),
        ({"lacks": {"ddp-2": " "}}, "lacks gives no reason for ddp-2. Say why"),
        ({"worlds": (1, 4)}, "strategies has single-1, ddp-2, and worlds is (1, 4): give for each of them a pair"),
        ({"strategies": ()}, "worlds is []: give at least one number of ranks"),
        ({"strategies": (("ddp", 2), ("ddp", 2))}, "strategies has ddp-2 twice. Give their functions names"),
        ({"strategies": ((unsendable(), 2),)}, "which cannot be sent to the ranks"),
        ({"precision": unsendable()}, "Give the name of an installed precision, its class, or a function"),
        ({"test_losses_go_down": None}, "TestIt overrides test_losses_go_down of PrecisionSuite"),
    ],
    ids=lambda value: re.sub(r"\W+", " ", str(value))[:40] if isinstance(value, dict) else "",
)
def test_a_declaration_that_does_not_hold_is_refused(attributes, message):
    with pytest.raises(AssertionError, match=re.escape(message)):
        declared(**attributes)


def test_what_may_be_declared_is_accepted():
    declared(tolerance=0.1, gradient_tolerance=0.1, worlds=(2,), lacks={f"{ALIVE}[ddp-2]": "why", TWICE: "why"})
    declared(strategies=(("single", 1), (wrong.Refusing, 4)), test_something_else=lambda self: None)
