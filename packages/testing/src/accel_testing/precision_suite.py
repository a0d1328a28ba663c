"""The contract of a precision, as a suite of tests to inherit.

    from accel_testing import PrecisionSuite
    from my_package import MyPrecision

    class TestMyPrecision(PrecisionSuite):
        precision = MyPrecision
        tolerance = 1e-2

Each test proves one sentence of the contract in `accel_core.contract.hook_specs` and
`accel_core.contract.precision_policy`, with real ranks, against plain torch in full precision on
the global batch. It needs pytest and no plugin of it. Full precision passes the same suite.

A precision holds under any strategy, or the strategy refuses it. Which ones it is tested under is
declared as well:

    strategies = (("single", 1), ("ddp", 2), (MyStrategy, 2))

What cannot be done is declared, with the reason, and then has to fail: a test, a test under one
strategy, or all of a strategy, which then has to refuse.

    lacks = {"test_a_finite_loss_never_skips_a_step[ddp-2]": "…", "MyStrategy-2": "it reduces in float32 only"}

The jobs of one strategy share one launch, for fresh ranks are what costs.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch

from accel_core import PrecisionPolicy
from accel_testing import precision_jobs as jobs
from accel_testing import precision_models as models
from accel_testing.precision_comparison import (
    by_shard,
    check_travel,
    compare_dtypes,
    distance,
    means,
    names_of,
    same,
    shown,
)
from accel_testing.precision_jobs import PrecisionJob, PrecisionSubject
from accel_testing.precision_observations import Refused
from accel_testing.shared_launch import Raised, observe
from accel_testing.strategy_suite import compare
from accel_testing.suite import Suite, require, require_travels

if TYPE_CHECKING:
    from accel_core import Precision, Strategy
    from accel_testing.models import Gradients
    from accel_testing.precision_observations import Trained

TOLERANCE = 1e-5
"""The largest relative error of full precision, over a few steps."""

REFUSAL = "test_the_policy_holds_or_is_refused"
STEPWISE = [[micro_batch] for micro_batch in range(jobs.STEPS)]
WINDOWS = [range(first, first + jobs.SIZE) for first in range(0, jobs.WINDOWS * jobs.SIZE, jobs.SIZE)]


class Setting(NamedTuple):
    """A strategy (a name, or what makes one) and a number of ranks. `str()` is its pytest id."""

    strategy: str | Callable[[], Strategy]
    world: int

    def __str__(self) -> str:
        name = self.strategy if isinstance(self.strategy, str) else getattr(self.strategy, "__name__", self.strategy)
        return f"{name}-{self.world}"


class _Declarations:
    """The declarations that a subclass may make in addition to those of every suite."""

    strategies: ClassVar[Sequence[tuple[str | Callable[[], Strategy], int]]] = (("single", 1), ("ddp", 2))
    tolerance: ClassVar[float] = TOLERANCE
    gradient_tolerance: ClassVar[float] = TOLERANCE


# The declarations stand last: what stands before `Suite` may not be overridden, and `test_the_declarations_hold` sees to it.
class PrecisionSuite(Suite, _Declarations):
    """The tests of a precision. Subclass it as `Test…`, and set `precision`.

    Attributes:
        precision: the name of an installed precision, or what makes one without arguments: the
            class, or a function at the level of a module, because it is pickled by its name.
        strategies: pairs of a strategy (its name, or what makes one) and a number of ranks.
        tolerance: the largest relative error of a loss within six steps, against full precision.
        gradient_tolerance: that of a parameter's gradient, and of their joint norm, both as
            Euclidean norms.
        worlds: the numbers of ranks for which `strategies` are run; where it is not given, all of
            them.

    For `lacks`, `cpu`, `patience` and `timeout` see `accel_testing.suite.Suite`. Tolerances that
    are not given are those of full precision.
    """

    precision: ClassVar[str | Callable[[], Precision]]
    _examined: ClassVar[str] = "precision"
    _jobs = jobs.JOBS

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "worlds" not in vars(cls):
            cls.worlds = sorted({world for _, world in cls.strategies})

    def pytest_generate_tests(self, metafunc: Any) -> None:
        """Runs each test once per strategy; only the refusal where the strategy is lacking."""
        if "setting" in metafunc.fixturenames:
            test: Any = metafunc.function.__name__
            chosen: list[Any] = [
                setting for setting in self._settings() if test == REFUSAL or str(setting) not in self.lacks
            ]
            metafunc.parametrize("setting", [self._case(test, setting) for setting in chosen])

    def test_the_declarations_hold(self) -> None:
        """All declarations hold, and strategies are pairs that can be sent to the ranks."""
        super().test_the_declarations_hold()
        name, settings = type(self).__name__, self._settings()
        require(
            bool(settings) and {setting.world for setting in settings} == set(self.worlds),
            f"{name}.strategies has {', '.join(str(Setting(*pair)) for pair in self.strategies) or 'nothing'}, and worlds is "
            f"{self.worlds!r}: give for each of them a pair of a strategy and that number of ranks, such as ('ddp', 2).",
        )
        ids = list(map(str, settings))
        twice = sorted({each for each in ids if ids.count(each) > 1})
        require(
            not twice,
            f"{name}.strategies has {', '.join(twice)} twice. Give their functions names that tell them apart.",
        )
        for setting in settings:
            require_travels(setting.strategy, "strategy", f"{name}.strategies")

    def test_the_policy_is_a_value(self, setting: Setting) -> None:
        """It is equal for precisions made in the same way, and for a copy, if not refused."""
        for fact in self._facts(jobs.described, setting):
            require(
                isinstance(fact.policy, PrecisionPolicy),
                f"policy is {fact.policy!r}, expected an accel_core.PrecisionPolicy(param, compute, reduce, output, input).",
            )
            require(
                fact.again == fact.policy,
                f"policy is {fact.policy}, and {fact.again} of another one that was made in the same way. It depends on "
                f"options alone.",
            )
            refused = isinstance(fact.copied, Raised)
            clear = refused and fact.copied.kind == "TypeError" and "precision" in fact.copied.message.lower()
            require(
                clear or fact.copied == fact.policy,
                f"A pickled copy {'was refused by ' + fact.copied.text if refused else f'has the policy {fact.copied}'}\n"
                f"Keep what can be pickled, or raise a TypeError that says why this precision cannot be.",
            )

    def test_the_policy_holds_or_is_refused(self, setting: Setting) -> None:
        """The declared dtypes are observed, or every rank raises a ValueError with a reason."""
        lacking = self.lacks.get(str(setting))
        for rank, fact in enumerate(self._facts(jobs.observed, setting)):
            if isinstance(fact, Refused):
                require(
                    lacking is not None,
                    f"{setting} refused the precision on rank {rank}:\n{fact.text}\nIf the strategy cannot honour the policy, "
                    f"declare it: lacks = {{{str(setting)!r}: 'the reason'}}.",
                )
                require(
                    len(fact.message.split()) > 3,
                    f"{setting} refused the precision on rank {rank} with {fact.message!r}. Say what was asked, and what can be done.",
                )
                continue
            require(
                lacking is None,
                f"lacks names {setting} ({lacking}), and prepare() took the model on rank {rank}. Take the line out, or have the "
                f"strategy raise a ValueError.",
            )
            compare_dtypes(fact, f"Under {setting} on rank {rank}")
            check_travel(fact, f"Under {setting} on rank {rank}")

    def test_a_model_that_is_only_evaluated_obeys_the_policy(self, setting: Setting) -> None:
        """With `evaluation_mode=True` dtypes are those of training."""
        for rank, fact in enumerate(self._facts(jobs.observed_evaluating, setting)):
            compare_dtypes(fact, f"With evaluation_mode=True under {setting} on rank {rank}")

    def test_evaluating_computes_what_training_computes(self, setting: Setting) -> None:
        """To the bit where nothing is dropped; with `evaluation_mode=True` within the tolerance."""
        for rank, (expected, found) in enumerate(self._facts(jobs.evaluated, setting)):
            for how, output in found.items():
                tolerance = 0.0 if how.startswith("a trained") else self.gradient_tolerance
                error = distance(output, expected)
                require(
                    error <= tolerance,
                    f"What {how} made of a batch under no_grad() on rank {rank} is off by {error:.1e} from the forward of "
                    f"training. An evaluation computes in the same dtypes.",
                )

    def test_losses_are_those_of_full_precision(self, setting: Setting) -> None:
        """Over six steps, within the declared tolerance."""
        facts = self._facts(jobs.trained, setting)
        self._compare_losses(facts, models.reference_losses(STEPWISE, facts[0].count), "steps")

    def test_windows_of_accumulation_are_big_batches(self, setting: Setting) -> None:
        """Within the tolerance: each micro-batch is scaled, and their mean is unscaled once."""
        facts = self._facts(jobs.accumulated, setting)
        self._compare_losses(facts, models.reference_losses(WINDOWS, facts[0].count), "windows of accumulation")

    def test_losses_go_down(self, setting: Setting) -> None:
        """With and without accumulation the loss falls, half as far at least as in float32."""
        for job, windows in ((jobs.trained, STEPWISE), (jobs.accumulated, WINDOWS)):
            facts = self._facts(job, setting)
            found, count = means(facts)[-1], facts[0].count
            untrained, expected = (models.reference_losses(windows, count, *rate)[-1] for rate in ((0.0,), ()))
            require(
                found < (untrained + expected) / 2,
                f"{job.__name__}: the last loss is {found:.5f}, and {expected:.5f} in full precision, and {untrained:.5f} that of "
                f"the untrained model. Updates may be lost in the dtype of the parameters, or gradients in that of the backward.",
            )

    def test_ranks_agree_to_the_bit(self, setting: Setting) -> None:
        """After training all of them hold the same model."""
        for job in (jobs.trained, jobs.accumulated):
            given = [fact.state for fact in self._facts(job, setting) if fact.state]
            for state in given[1:]:
                compare(state, given[0], f"{job.__name__}: the state of a rank", "What a rank decides, all decide", 0.0)

    def test_a_finite_loss_never_skips_a_step(self, setting: Setting) -> None:
        """But for the first, with which a dynamic scale finds its size."""
        for job in (jobs.trained, jobs.accumulated):
            for rank, fact in enumerate(self._facts(job, setting)):
                require(
                    not any(fact.skipped[1:]),
                    f"{job.__name__}: on rank {rank} optimizer_step_was_skipped was {fact.skipped} after steps with finite "
                    f"losses. Return accel_core.SKIPPED for an overflow alone.",
                )

    def test_a_step_that_overflows_on_one_rank_is_left_out_on_all(self, setting: Setting) -> None:
        """This holds where losses are scaled. Elsewhere no step is left out, on any rank."""
        facts = self._facts(jobs.overflowed, setting)
        for rank, fact in enumerate(facts):
            require(
                fact.skipped[1] == fact.scales,
                f"A gradient of one number overflowed on one rank, and on rank {rank} optimizer_step_was_skipped is "
                f"{fact.skipped[1]}, where losses are {'' if fact.scales else 'not '}scaled. Ask all ranks what they have found, and "
                f"return accel_core.SKIPPED from optimizer_step() on all.",
            )
            if fact.scales and fact.states[0]:
                what = f"The state of rank {rank} after a step that was left out"
                compare(fact.states[1], fact.states[0], what, "Nothing is changed", 0.0)

    def test_a_schedule_waits_while_steps_are_left_out(self, setting: Setting) -> None:
        """It moves with each step that is taken."""
        for rank, fact in enumerate(self._facts(jobs.overflowed, setting)):
            moved = [fact.rates[1] != fact.rates[0], fact.rates[2] != fact.rates[1]]
            require(
                moved == [not fact.scales, True],
                f"Around an overflow the learning rates on rank {rank} are {fact.rates}, where losses are "
                f"{'' if fact.scales else 'not '}scaled. The schedule is held back where optimizer_step() returns accel_core.SKIPPED.",
            )

    def test_training_goes_on_after_an_overflow(self, setting: Setting) -> None:
        """The next step has finite numbers; one that was never scaled is lost, as losses show."""
        for rank, fact in enumerate(self._facts(jobs.overflowed, setting)):
            if not (fact.scales and fact.states[0]):
                continue
            _, before, after = fact.states
            changed = any(not torch.equal(after[name], before[name]) for name in after)
            finite = all(bool(torch.isfinite(tensor).all()) for tensor in after.values())
            require(
                changed and finite and not fact.skipped[2],
                f"The step after an overflow on rank {rank}: skipped {fact.skipped[2]}, parameters changed {changed}, finite "
                f"{finite}. Nothing of the overflow stays behind but a smaller scale.",
            )

    def test_clipping_sees_the_gradients_of_the_plain_loss(self, setting: Setting) -> None:
        """`clip_grad_norm_` unscales; norm and gradients are those of full precision."""
        for rank, fact in enumerate(self._facts(jobs.clipped, setting)):
            expected = models.reference_gradients([0], fact.count)
            norm = float(torch.cat([gradient.flatten() for gradient in expected.values()]).norm())
            self._compare_number(fact.norm, norm, f"The norm that clip_grad_norm_() returned on rank {rank}")
            factor = jobs.MAX_NORM / (norm + 1e-6)  # as torch has it
            shrunk = {name: gradient * factor for name, gradient in expected.items()}
            self._compare_gradients(fact.gradients, shrunk, f"After clipping on rank {rank}")

    def test_unscaled_gradients_are_those_of_the_plain_loss(self, setting: Setting) -> None:
        """After `unscale_gradients`, for one batch and for a window."""
        for rank, fact in enumerate(self._facts(jobs.unscaled, setting)):
            expected = models.reference_gradients([0], fact.count)
            self._compare_gradients(fact.once, expected, f"After unscale_gradients() on rank {rank}")
            expected = models.reference_gradients(range(jobs.SIZE), fact.count)
            self._compare_gradients(fact.closed, expected, f"At the end of a window, unscaled on rank {rank}")

    def test_unscaling_twice_is_unscaling_once(self, setting: Setting) -> None:
        """Also when clipping comes after it."""
        for rank, fact in enumerate(self._facts(jobs.unscaled, setting)):
            what = f"The gradients on rank {rank}, unscaled twice and clipped to any norm"
            compare(fact.twice, fact.once, what, "They are unscaled once between two steps", TOLERANCE)

    def test_optimizers_are_unscaled_each_for_itself(self, setting: Setting) -> None:
        """In any order of unscaling and stepping, an update is as large as with one optimizer."""
        for rank, fact in enumerate(self._facts(jobs.several, setting)):
            for when, pairs in fact.updates.items():
                for which, (found, expected) in zip(("first", "second"), pairs, strict=True):
                    require(
                        expected / 2 <= found <= expected * 2,
                        f"Of two optimizers {when}: on rank {rank} the {which} one moved its model by {found:.3g}, and by itself it "
                        f"moves it by {expected:.3g}. Remember for each optimizer whether its gradients were unscaled.",
                    )

    def test_optimizers_overflow_each_for_itself(self, setting: Setting) -> None:
        """The one whose gradients are not finite is left out, whatever the other one does."""
        for rank, fact in enumerate(self._facts(jobs.several, setting)):
            if len(fact.states) == 1 or not fact.states[0][0]:
                continue
            before, second, first, after = fact.states
            finite = all(bool(torch.isfinite(tensor).all()) for state in after for tensor in state.values())
            kept = same(second[1], before[1]) and same(first[0], second[0])
            moved = not same(after[0], first[0]) and not same(after[1], first[1])
            require(
                finite and kept and moved,
                f"Of two optimizers the second one overflowed, then the first, then none. On rank {rank} the models are finite: "
                f"{finite}; that of an overflow stayed as it was: {kept}; both went on: {moved}. Look at the gradients of each "
                f"optimizer when it steps.",
            )

    def test_in_an_open_window_nothing_is_unscaled(self, setting: Setting) -> None:
        """The pending gradients are parts of a sum, and the other parts need the same scale."""
        for rank, fact in enumerate(self._facts(jobs.unscaled, setting)):
            what = f"The pending gradients on rank {rank} after unscale_gradients()"
            compare(fact.untouched, fact.pending, what, "Nothing is unscaled in an open window", 0.0)

    def test_a_run_that_is_loaded_goes_on_to_the_bit(self, setting: Setting) -> None:
        """In a fresh Accelerator, from weights in the dtype in which they are trained."""
        for rank, (at, after, loaded, ended) in enumerate(self._facts(jobs.resumed, setting)):
            rule = "Parameters are saved in their most precise dtype"
            compare(loaded.state, at.state, f"What rank {rank} loaded", rule, 0.0)
            compare(ended.state, after.state, f"The state of rank {rank} that was loaded and trained on", rule, 0.0)

    def test_what_a_precision_remembers_is_loaded(self, setting: Setting) -> None:
        """The scale of a loss, and `state_dict`, right after loading and later."""
        for rank, (at, after, loaded, ended) in enumerate(self._facts(jobs.resumed, setting)):
            for when, found, expected in (("", loaded, at), (" and trained on", ended, after)):
                require(
                    found.scale == expected.scale and same(found.remembered, expected.remembered),
                    f"What rank {rank} loaded{when} has the scale {found.scale:g} and the state {found.remembered}, expected "
                    f"{expected.scale:g} and {expected.remembered}. state_dict() gives all that a run changes, and "
                    f"load_state_dict() puts it back.",
                )

    def test_weights_load_into_full_precision(self, setting: Setting) -> None:
        """Weights of a checkpoint are plain tensors that full precision loads."""
        facts = self._facts(jobs.read_in_full, setting)
        saved = next(state for state, _, _ in facts if state)
        for rank, (_, read, loss) in enumerate(facts):
            compare(read, saved, f"What a plain model read on rank {rank}", "A checkpoint knows no precision", 0.0)
            require(
                0 < loss < float("inf"),
                f"The next step in full precision on rank {rank} has the loss {loss}.",
            )

    def test_names_stay(self, setting: Setting) -> None:
        """Of parameters and of the state, whatever was converted."""
        parameters, state = names_of(models.Pupil())
        for rank, fact in enumerate(self._facts(jobs.named, setting)):
            require(
                fact.parameters == parameters and fact.state in (state, []),
                f"On rank {rank} the parameters are called {fact.parameters} and the state {fact.state}, expected {parameters} and "
                f"{state}. Replace modules by such as have the same names inside.",
            )

    def test_a_model_without_the_casts_can_be_pickled(self, setting: Setting) -> None:
        """After `unwrap_model(model, keep_fp32_wrapper=False)`."""
        _, state = names_of(models.Pupil())
        for rank, fact in enumerate(self._facts(jobs.named, setting)):
            require(
                fact.copied == ("Pupil", state),
                f"A model of unwrap_model(keep_fp32_wrapper=False) on rank {rank} was to be pickled and came back as "
                f"{getattr(fact.copied, 'text', fact.copied)}\nNothing that cannot be pickled stays on the model.",
            )

    def test_every_parameter_trains(self, setting: Setting) -> None:
        """Whether the optimizer is prepared with its model, before it, or built afterwards."""
        for rank, fact in enumerate(self._facts(jobs.named, setting)):
            for order, still in fact.still.items():
                require(
                    not still,
                    f"With an optimizer {order} two steps on rank {rank} did not change {', '.join(still)}. A converted module "
                    f"takes over the parameters, and gradients reach all of them.",
                )

    def test_autocast_gives_the_compute_dtype(self, setting: Setting) -> None:
        """Inside the block only, and in full precision with `AutocastKwargs(enabled=False)`."""
        for rank, (compute, found) in enumerate(self._facts(jobs.autocast, setting)):
            for where, dtype in found.items():
                expected = compute or torch.float32 if where.startswith("inside") else torch.float32
                require(
                    dtype is expected,
                    f"A product of float32 matrices, autocast {where}, is {dtype} on rank {rank}, expected {expected}: compute is "
                    f"{compute}. Declare the dtype in the policy, and switch nothing on by yourself.",
                )

    def test_explain_tells_what_holds(self, setting: Setting) -> None:
        """`details()` has words for whatever is not full precision, and `explain()` shows them."""
        for fact in self._facts(jobs.explained, setting):
            require(
                fact.full or bool(fact.details),
                "details() is empty, and this is not full precision. Return at least {'policy': str(self.policy)}.",
            )
            missing = [text for text in fact.details.values() if not text.strip() or text not in fact.text]
            require(
                not missing, f"explain() does not show {missing} of details(). Give one line of words for each thing."
            )

    def test_two_precisions_live_side_by_side(self, setting: Setting) -> None:
        """In one process, with full precision, and neither changes what the other computes."""
        facts = self._facts(jobs.side_by_side, setting)
        expected = models.reference_losses([[0], [1], [2]], facts[0].count)
        found = by_shard([(fact.index, fact.full) for fact in facts])
        for loss, other in zip(found, expected, strict=True):
            require(
                abs(loss - other) <= TOLERANCE * other,
                f"Beside this precision, full precision has the mean losses {shown(found)}, expected {shown(expected)}.",
            )
        for rank, fact in enumerate(facts):
            require(
                fact.beside == fact.alone,
                f"Beside full precision the losses on rank {rank} are {shown(fact.beside)}, and by itself {shown(fact.alone)}. "
                f"Keep nothing in modules or classes.",
            )

    def test_a_model_that_is_freed_is_the_users_again(self, setting: Setting) -> None:
        """After `free_memory` it computes what a plain model computes with its weights."""
        for rank, fact in enumerate(self._facts(jobs.freed, setting)):
            if fact is not None:
                error = distance(*fact)
                require(
                    error <= TOLERANCE,
                    f"What a model made of a batch after free_memory() on rank {rank} is off by {error:.1e} from what a plain model "
                    f"makes of it with the same weights. Undo in revert_model() what convert_model() has done.",
                )

    def test_nothing_is_kept_alive(self, setting: Setting) -> None:
        """All objects of a run that has ended are freed with its last reference."""
        self._require_freed(jobs.released, setting)

    def _settings(self) -> list[Setting]:
        return [Setting(*pair) for pair in self.strategies if pair[1] in self.worlds]

    def _names(self, test: str) -> list[str]:
        settings = list(map(str, self._settings()))
        return [test, *(f"{test}[{setting}]" for setting in settings), *settings]

    def _facts(self, job: PrecisionJob, world: Any) -> list[Any]:
        """The facts of each rank in a job, in rank order; `world` is a `Setting`."""
        setting: Setting = world
        launches: dict[Any, Any] = type(self)._launches
        if setting not in launches:
            asked = [jobs.observed] if str(setting) in self.lacks else self._jobs
            with tempfile.TemporaryDirectory(prefix="precisions-") as folder:
                subject = self._subject_of(setting, folder)
                launches[setting] = observe(subject, asked, setting.world, self.timeout)
        return super()._facts(job, world)

    def _subject_of(self, setting: Setting, folder: str) -> PrecisionSubject:
        patience = timedelta(seconds=self.patience)
        return PrecisionSubject(setting.strategy, self.cpu, patience, type(self).precision, folder)

    def _compare_losses(self, facts: Sequence[Trained], expected: Sequence[float], what: str) -> None:
        found = means(facts)
        errors = [abs(loss - other) / other for loss, other in zip(found, expected, strict=True)]
        require(
            max(errors) <= self.tolerance,  # False for a nan too
            f"The mean losses of {len(expected)} {what} are {shown(found)}, in full precision {shown(expected)}. The largest "
            f"relative error is {max(errors):.1e}, and tolerance is {self.tolerance:g}.",
        )

    def _compare_gradients(self, found: Gradients, expected: Gradients, what: str) -> None:
        require(
            found.keys() == expected.keys(), f"{what} there are gradients of {sorted(found)}, not {sorted(expected)}."
        )
        for name, gradient in expected.items():
            error = distance(found[name], gradient)
            factor = float(found[name].double().norm() / gradient.double().norm())
            require(
                error <= self.gradient_tolerance,
                f"{what} the gradient of {name} is {factor:.4g} times as large as in full precision, and off by {error:.1e}; "
                f"gradient_tolerance is {self.gradient_tolerance:g}. unscale_gradients() divides by what scale_loss() multiplied.",
            )

    def _compare_number(self, found: float, expected: float, what: str) -> None:
        error = abs(found - expected) / expected
        require(
            error <= self.gradient_tolerance,
            f"{what} is {found:.6g}, in full precision {expected:.6g}: off by {error:.1e}, and gradient_tolerance is "
            f"{self.gradient_tolerance:g}. unscale_gradients() divides by what scale_loss() multiplied.",
        )
