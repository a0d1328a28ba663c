"""The contract of a strategy about checkpoints, as a suite of tests to inherit.

    from accel_testing import CheckpointSuite
    from my_package import MyStrategy

    class TestMyStrategysCheckpoints(CheckpointSuite):
        strategy = MyStrategy

A checkpoint knows no strategy. So it is held against one process: what the strategy saves, the
strategy `single` loads, and the other way round, with weights, optimizer, scheduler and all. A
strategy whose ranks hold everything declares `replicates_parameters`, and the core does the rest;
others own the hooks `model_state`, `model_loaded`, `optimizer_state`, `optimizer_misfits` and
`load_optimizer_state` (see `accel_core.contract.hook_specs`). Training itself is `StrategySuite`'s,
which is to pass first.

What a strategy cannot do is declared, with the reason, and then has to fail, as in the other
suites.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar

from accel_testing import checkpoint_jobs as jobs
from accel_testing.checkpoint_jobs import CheckpointSubject, Moment, PlainOptimizer
from accel_testing.shared_launch import observe
from accel_testing.strategy_suite import TOLERANCE, compare
from accel_testing.suite import Suite, require

if TYPE_CHECKING:
    from accel_core import Strategy

OPTIMIZER_HOOKS = "optimizer_state names the state of each parameter, and load_optimizer_state puts it back"


class CheckpointSuite(Suite):
    """The tests of a strategy's checkpoints. Subclass it as `Test…`, and set `strategy`.

    Attributes:
        strategy: the name of an installed strategy, or what makes one without arguments: the class,
            or a function at the level of a module, because it is pickled by its name.

    For `worlds`, `lacks`, `cpu`, `patience` and `timeout` see `accel_testing.suite.Suite`.
    """

    strategy: ClassVar[str | Callable[[], Strategy]]
    _examined: ClassVar[str] = "strategy"
    _jobs = jobs.JOBS

    def test_a_run_that_is_loaded_goes_on_to_the_bit(self, world: int) -> None:
        """On as many ranks as saved it: weights, optimizer, scheduler and random streams."""
        for rank, (at, after, loaded, ended) in enumerate(self._facts(jobs.resumed, world)):
            what = f"What rank {rank} loaded"
            rule = "model_state names the memory that is trained, with the most precise copy of each parameter"
            compare(loaded.state, at.state, what, rule, 0.0)
            _compare_numbers(loaded, at, what)
            rule = f"model_loaded fills the copies that are computed with; {OPTIMIZER_HOOKS}"
            compare(
                ended.state, after.state, f"The state of rank {rank}, after it was loaded and trained on", rule, 0.0
            )
            _compare_numbers(ended, after, f"After training on, rank {rank}")

    def test_one_process_reads_the_weights_that_were_trained(self, world: int) -> None:
        """Under the user's names, each parameter whole."""
        saved = self._facts(jobs.resumed, world)[0][0]
        expected, _, _ = self._facts(jobs.trained_alone, world)[0]
        found, _, _ = self._facts(jobs.read_own, world)[0]
        what = f"What one process loaded of a checkpoint of {world} ranks"
        rule = "model_state gives each parameter with the boxes of it that are on this rank"
        compare(found.state, expected.state, what, rule)
        if saved.state:
            compare(found.state, saved.state, what, rule, 0.0)

    def test_one_process_reads_the_optimizer_that_was_trained(self, world: int) -> None:
        """By the names of the user's parameters, with steps and options of each group."""
        _, expected, _ = self._facts(jobs.trained_alone, world)[0]
        _, found, _ = self._facts(jobs.read_own, world)[0]
        self._compare_optimizers(found, expected, f"The optimizer that one process loaded, of {world} ranks", TOLERANCE)

    def test_one_process_goes_on_with_what_was_saved(self, world: int) -> None:
        """It ends where a run of one process ends that was never interrupted."""
        _, _, expected = self._facts(jobs.trained_alone, world)[0]
        _, _, found = self._facts(jobs.read_own, world)[0]
        what = f"The state of one process that went on with a checkpoint of {world} ranks"
        compare(found.state, expected.state, what, "A checkpoint holds the whole run")
        require(found.rates == expected.rates, f"{what} has the learning rates {found.rates}, not {expected.rates}.")

    def test_a_checkpoint_of_one_process_is_taken_over(self, world: int) -> None:
        """Its values are loaded to the bit, and the run goes on as in one process."""
        at, _, after = self._facts(jobs.trained_alone, world)[0]
        for rank, (loaded, ended) in enumerate(self._facts(jobs.taken_over, world)):
            if loaded.state:
                what = f"What rank {rank} loaded of a checkpoint of one process"
                compare(loaded.state, at.state, what, "model_state names live memory, and is filled", 0.0)
                what = f"The state of rank {rank} that went on with a checkpoint of one process"
                compare(ended.state, after.state, what, f"model_loaded fills what is computed with; {OPTIMIZER_HOOKS}")
            found = loaded.rates, ended.rates
            require(
                found == (at.rates, after.rates),
                f"With a checkpoint of one process rank {rank} had the learning rates {found}, not {(at.rates, after.rates)}. "
                f"load_optimizer_state gives the groups their options back.",
            )

    def test_what_is_taken_over_is_saved_as_it_was(self, world: int) -> None:
        """One process saves, the strategy loads and saves, one process loads: equal to the bit."""
        self._facts(jobs.taken_over, world)
        at, expected, _ = self._facts(jobs.trained_alone, world)[0]
        found_at, found, _ = self._facts(jobs.read_again, world)[0]
        what = f"What came back to one process from {world} ranks"
        compare(found_at.state, at.state, what, "What is loaded is saved as it was", 0.0)
        self._compare_optimizers(found, expected, f"The optimizer of it, from {world} ranks", 0.0)

    def test_buffers_are_those_of_rank_0(self, world: int) -> None:
        """They may differ from rank to rank, and a mosaic would be nobody's state."""
        facts = self._facts(jobs.resumed, world)
        found = [self._facts(jobs.read_own, world)[0][0].noted, *(loaded.noted for _, _, loaded, _ in facts)]
        require(
            set(found) == {facts[0][0].noted},
            f"A buffer was {[at.noted for at, *_ in facts]} on the ranks that saved it; one process loaded {found[0]}, and the "
            f"ranks {found[1:]}. Present buffers as Replicated: that of the lowest rank is saved, and all load it.",
        )

    def test_ties_survive(self, world: int) -> None:
        """After loading, tied parameters are one."""
        for job in (jobs.resumed, jobs.taken_over):
            for rank, moments in enumerate(self._facts(job, world)):
                require(
                    all(moment.tied for moment in moments),
                    f"encoder.weight and decoder.weight were one parameter, and are two on rank {rank} after load_state(). "
                    f"Fill parameters, and leave them in their places; present the second name as an Alias.",
                )

    def test_an_open_window_is_saved_or_refused(self, world: int) -> None:
        """Pending gradients are saved, or the error says when saving works."""
        for rank, fact in enumerate(self._facts(jobs.saved_in_open_window, world)):
            if isinstance(fact, str):
                require(
                    "sync_gradients" in fact,
                    f"save_state() inside a window raised on rank {rank}: {fact}\nSay when to save instead: when "
                    f"accelerator.sync_gradients is True.",
                )
                continue
            uninterrupted, found = fact
            what = f"The state of rank {rank} that was saved inside a window, and went on"
            compare(found.state, uninterrupted.state, what, "Pending gradients are saved with the run")

    def test_the_state_of_another_optimizer_is_refused_before_anything_changes(self, world: int) -> None:
        """`optimizer_misfits`: every rank raises, and none has loaded a part."""
        for rank, (before, after, refusal) in enumerate(self._facts(jobs.given_another_optimizer, world)):
            require(
                refusal is not None and "AdamW" in refusal,
                f"The state of an AdamW was to be loaded into an SGD, and on rank {rank} it "
                f"{'was' if refusal is None else 'was refused, but not by that name: ' + refusal}. optimizer_misfits says "
                f"what does not fit.",
            )
            what = f"The state of rank {rank} after a checkpoint was refused"
            compare(after.state, before.state, what, "Nothing is loaded where not all of it fits", 0.0)

    def _compare_optimizers(self, found: PlainOptimizer, expected: PlainOptimizer, what: str, tolerance: float) -> None:
        compare(found.state, expected.state, what, OPTIMIZER_HOOKS, tolerance)
        for number, (group, other) in enumerate(zip(found.groups, expected.groups, strict=True)):
            require(
                group == other,
                f"{what}: group {number} has the options {group}, expected {other}. The groups of an OptimizerState are the "
                f"optimizer's own, without its parameters.",
            )

    def _facts(self, job: Callable[[Any], Any], world: int) -> list[Any]:
        if world not in type(self)._launches:
            with tempfile.TemporaryDirectory(prefix="checkpoints-") as folder:
                subject = replace(self._subject(world), folder=folder)
                alone = replace(subject, strategy="single")
                first = observe(alone, jobs.ALONE_FIRST, 1, self.timeout)
                found = observe(subject, self._jobs, world, self.timeout)
                last = observe(alone, jobs.ALONE_LAST, 1, self.timeout)
            type(self)._launches[world] = {**first, **found, **last}
        return super()._facts(job, world)

    def _subject(self, world: int) -> CheckpointSubject:  # noqa: ARG002
        return CheckpointSubject(type(self).strategy, self.cpu, timedelta(seconds=self.patience))


def _compare_numbers(found: Moment, expected: Moment, what: str) -> None:
    for name, number, other in (
        ("learning rates", found.rates, expected.rates),
        ("random numbers", found.random, expected.random),
    ):
        require(number == other, f"{what}: the {name} are {number}, expected {other}. A run goes on as it was saved.")
