"""The contract of a strategy, as a suite of tests to inherit.

    from accel_testing import StrategySuite
    from my_package import MyStrategy

    class TestMyStrategy(StrategySuite):
        strategy = MyStrategy

Each test proves one sentence of the contract in `accel_core.contract.hook_specs`, with real ranks,
against plain torch in one process on the global batch. It needs pytest and no plugin of it. The
strategies of the core pass the same suite.

What a strategy cannot do is declared, with the reason, and then has to fail: a lack that has
vanished is noticed.

    lacks = {"test_clipping_gives_the_norm_of_one_process": "the engine clips all parameters or none"}

The jobs of one world size share one launch, for fresh ranks are what costs. When a job breaks it (a
rank is stuck, or raises where others do not), the tests of that job fail, and the jobs after it get
another launch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, ClassVar

import torch

from accel_testing import models, strategy_jobs
from accel_testing.ranks import run_ranks
from accel_testing.shared_launch import Job, Raised, Subject
from accel_testing.suite import Suite, require

if TYPE_CHECKING:
    from accel_core import Strategy
    from accel_testing.models import Gradients, State

TOLERANCE = 1e-6
"""The largest relative error of a gradient, or of a state, in single precision."""

MEAN = "After the closing backward of a window, .grad is the mean over the data-parallel ranks"


class StrategySuite(Suite):
    """The tests of a strategy. Subclass it as `Test…`, and set `strategy`.

    Attributes:
        strategy: the name of an installed strategy, or what makes one without arguments: the class,
            or a function at the level of a module, because it is pickled by its name.

    For `worlds`, `lacks`, `cpu`, `patience` and `timeout` see `accel_testing.suite.Suite`.
    """

    strategy: ClassVar[str | Callable[[], Strategy]]
    _examined: ClassVar[str] = "strategy"
    _jobs = strategy_jobs.JOBS

    def test_every_part_of_the_data_is_read_once(self, world: int) -> None:
        """`layout`: over the data group, in its order, shards are 0, 1, …, count - 1."""
        layouts = self._facts(strategy_jobs.layout, world)
        index_of = {rank: index for rank, index, _, _ in layouts}
        for rank, index, count, ranks in layouts:
            found = [index_of[other] for other in ranks]
            require(
                rank in ranks and found == list(range(count)),
                f"layout() gave rank {rank} Shard({index}, {count}) and the data group {ranks}, whose ranks have the shards "
                f"{found}. One rank for each shard, in shard order, is expected, or samples are read twice or never.",
            )

    def test_training_starts_from_the_weights_of_rank_0(self, world: int) -> None:
        """`prepare_model`: models that differ from rank to rank become one, with frozen parts and buffers."""
        expected = dict(models.built(models.InheritedNet, 0).state_dict())
        for rank, state in _given(self._facts(strategy_jobs.start, world)):
            compare(state, expected, f"The state of rank {rank} after prepare()", "Broadcast it from rank 0", 0.0)

    def test_preparing_leaves_the_surroundings_alone(self, world: int) -> None:
        """Random streams, the environment and torch's defaults belong to the user."""
        for rank, kept in enumerate(self._facts(strategy_jobs.surroundings, world)):
            changed = [name for name, same in kept.items() if not same]
            require(not changed, f"prepare() changed {' and '.join(changed)} on rank {rank}. Restore what you touch.")

    def test_a_gradient_is_that_of_the_global_batch(self, world: int) -> None:
        """Without accumulation, step after step."""
        for rank, (count, found) in enumerate(self._facts(strategy_jobs.two_backwards, world)):
            for step, gradients in enumerate(found):
                expected = models.reference_gradients([step], count)
                compare(gradients, expected, f"The gradient of step {step} on rank {rank}", MEAN)

    def test_a_window_is_one_big_batch(self, world: int) -> None:
        """Ten micro-batches by four give three windows, the last of which averages over two."""
        self._check_windows(strategy_jobs.accumulated, world, [range(4), range(4, 8), range(8, 10)])

    def test_a_window_synchronised_at_each_micro_batch_is_one_big_batch(self, world: int) -> None:
        """`sync_each_batch` changes when gradients travel, and not what they are."""
        self._check_windows(strategy_jobs.accumulated_in_sync, world, [range(4), range(4, 8), range(8, 10)])

    def test_a_window_by_hand_is_one_big_batch(self, world: int) -> None:
        """Gradients add up outside `accumulate` too; each backward weighs 1/steps."""
        self._check_windows(strategy_jobs.accumulated_by_hand, world, [range(4)])

    def test_several_backwards_of_one_forward_add_up(self, world: int) -> None:
        """`backward`: the user's options are passed on, and each backward synchronises."""
        for rank, (count, [gradients]) in enumerate(self._facts(strategy_jobs.backward_twice, world)):
            expected = _times(2, models.reference_gradients([0], count))
            compare(gradients, expected, f"The gradient of two backwards on rank {rank}", MEAN)

    def test_no_sync_keeps_gradients_local(self, world: int) -> None:
        """The place of the forward decides: a backward outside stays local as well."""
        for rank, (index, count, found) in enumerate(self._facts(strategy_jobs.held_back, world)):
            first, second = (models.reference_gradients([m * count + index], 1) for m in (0, 1))
            inside = "no_sync: backwards of forwards inside do not synchronise"
            compare(found[0], first, f"The gradient inside no_sync on rank {rank}", inside)
            both = _plus(first, second)
            compare(found[1], both, f"The gradient of a forward inside no_sync, on rank {rank}", inside)

    def test_gradients_held_back_arrive_with_the_next_synchronised_backward(self, world: int) -> None:
        """Nothing is lost that was accumulated inside `no_sync`."""
        for rank, (_, count, found) in enumerate(self._facts(strategy_jobs.held_back, world)):
            expected = _times(3, models.reference_gradients(range(3), count))
            compare(found[2], expected, f"The gradient of two micro-batches held back and one more, rank {rank}", MEAN)

    def test_an_error_inside_no_sync_ends_it(self, world: int) -> None:
        """A loop that catches it, as one for lack of memory, goes on with gradients of all ranks."""
        self._check_windows(strategy_jobs.interrupted, world, [range(1)])

    def test_trigger_sync_in_backward_synchronises(self, world: int) -> None:
        """A backward inside it synchronises, although its forward ran inside `no_sync`."""
        self._check_windows(strategy_jobs.triggered, world, [range(1)])

    def test_forward_backward_weighs_what_batches_hold(self, world: int) -> None:
        """Micro-batches of unequal weights, one masked, are one big batch; a step may follow."""
        self._check_tokens(strategy_jobs.token_window, strategy_jobs.same_token_batches, world, windows=1)

    def test_ranks_may_have_different_numbers_of_micro_batches(self, world: int) -> None:
        """In `forward_backward` each rank has its own number; a second window adds to the first."""
        self._check_tokens(strategy_jobs.uneven_window, strategy_jobs.uneven_token_batches, world, windows=2)

    def test_training_is_that_of_one_process(self, world: int) -> None:
        """After three steps of two micro-batches the parameters are those of plain torch."""
        for rank, (count, state) in enumerate(self._facts(strategy_jobs.trained, world)):
            if state:
                expected = models.reference_state([range(2), range(2, 4), range(4, 6)], count)
                compare(state, expected, f"The state of rank {rank} after three steps", "optimizer.step() trains")

    def test_all_ranks_hold_the_same_parameters(self, world: int) -> None:
        """After three steps, to the last bit."""
        (first, reference), *others = _given([state for _, state in self._facts(strategy_jobs.trained, world)])
        for rank, state in others:
            compare(
                state, reference, f"The state of rank {rank}, against rank {first}", "All ranks train one model", 0.0
            )

    def test_any_order_of_preparing_trains(self, world: int) -> None:
        """The optimizer before, after or with its model, in one call or more; or refused."""
        for rank, (count, found) in enumerate(self._facts(strategy_jobs.orders, world)):
            expected = models.reference_state([[0], [1]], count, factor=0.5)
            for order, state in found.items():
                if isinstance(state, Raised):
                    require(
                        order == "optimizer in a later call" and "prepared model" in state.message,
                        f"prepare() ({order}) on rank {rank} led to {state.text}\nOnly an optimizer that was built before "
                        f"its model was prepared, and is prepared after it, may be refused, naming its parameters.",
                    )
                elif state:
                    hint = 'If you replace parameters, re-point group["params"][:] of the optimizers that you are given'
                    compare(state, expected, f"The state of rank {rank} after two steps ({order})", hint)

    def test_two_optimizers_of_one_model_train(self, world: int) -> None:
        """Each its part of the parameters; or the second one is refused."""
        for rank, (count, found) in enumerate(self._facts(strategy_jobs.apart, world)):
            if isinstance(found, Raised):
                require(
                    found.kind in {"ValueError", "NotImplementedError"} and bool(found.message),
                    f"Two optimizers of one model led to {found.text}on rank {rank}. Train by both, or raise a ValueError.",
                )
            elif found:
                hint = "prepare_model() is given every optimizer that holds a parameter of the model"
                compare(found, models.reference_state([[0], [1]], count), f"The state of rank {rank}", hint)

    def test_clipping_gives_the_norm_of_one_process(self, world: int) -> None:
        """`clip_gradients` of all, a subset, a generator, beside a frozen part; the norm of `norm_type`."""
        for rank, (count, found) in enumerate(self._facts(strategy_jobs.clipped, world)):
            for choice, fact in found.items():
                _, norm_type = strategy_jobs.CLIPPED[choice]
                if isinstance(fact, Raised):
                    require(
                        norm_type != 2 and "norm_type" in fact.message,
                        f"clip_grad_norm_({choice}) raised on rank {rank}:\n{fact.text}\nA norm other than the Euclidean one may be "
                        f"refused, by the name norm_type.",
                    )
                    continue
                norm, gradients = fact
                expected_norm, expected = _clipped_reference(choice, count)
                error = abs(norm - expected_norm) / expected_norm
                require(
                    error <= TOLERANCE,
                    f"clip_grad_norm_({choice}) returned {norm:.8f} on rank {rank}; in one process the norm is "
                    f"{expected_norm:.8f}. clip_gradients() returns the norm of norm_type={norm_type:g} before clipping, over all shards.",
                )
                compare(
                    gradients, expected, f"The gradients on rank {rank} after clipping {choice}", "Clip by that norm"
                )

    def test_clipping_in_an_open_window_touches_nothing(self, world: int) -> None:
        """The pending gradients are parts of a sum."""
        for rank, (before, after) in enumerate(self._facts(strategy_jobs.clipped_in_open_window, world)):
            compare(after, before, f"The pending gradients on rank {rank}", "Nothing is clipped in an open window", 0.0)

    def test_several_models_train_side_by_side(self, world: int) -> None:
        """A generator and a critic, under one Accelerator and under one each."""
        for rank, (count, found) in enumerate(self._facts(strategy_jobs.adversaries, world)):
            expected = models.reference_adversaries(2, count)
            for arrangement, states in found.items():
                for model, state, reference in zip(("generator", "critic"), states, expected, strict=True):
                    if state:
                        what = f"The {model} on rank {rank} after two steps {arrangement}"
                        compare(state, reference, what, "Every trained model is synchronised")

    def test_a_model_that_is_not_trained_can_be_called(self, world: int) -> None:
        """A frozen model on all ranks, and one for evaluation on one rank alone."""
        x, _ = models.samples(0, models.ROWS)
        with torch.no_grad():
            expected = models.built(models.NormNet).eval()(x)
        for rank, outputs in enumerate(self._facts(strategy_jobs.evaluated, world)):
            for how, output in outputs.items():
                if output is not None:
                    what = f"What a model ({how}) made of a batch on rank {rank}"
                    compare({"output": output}, {"output": expected}, what, "It is to be called as it is")

    def test_unwrapping_gives_the_users_model(self, world: int) -> None:
        """The user's object, with the user's names, whatever stood around it."""
        model = models.built(models.NormNet)
        expected = {
            "is the user's": True,
            "class": "NormNet",
            "parameters": [name for name, _ in model.named_parameters()],
            "state": list(model.state_dict()),
        }
        for rank, found in enumerate(self._facts(strategy_jobs.names, world)):
            for what, value in found.items():
                require(
                    value == expected[what] or (what == "state" and not value and rank > 0),
                    f"After unwrap_model() on rank {rank}, {what!r} is {value!r}, expected {expected[what]!r}. Leave the "
                    f"user's module and its names as they are; put wrappers around it.",
                )

    def test_tied_parameters_stay_tied(self, world: int) -> None:
        """They are one parameter, with the gradient of both uses."""
        for rank, (count, tied, state) in enumerate(self._facts(strategy_jobs.ties, world)):
            require(tied, f"encoder.weight and decoder.weight were one parameter, and are two on rank {rank}.")
            if state:
                expected = models.reference_state([[0], [1]], count, models.TiedNet)
                compare(state, expected, f"The state of rank {rank} after two steps", "Average a tied parameter once")

    def test_preparing_twice_is_preparing_once(self, world: int) -> None:
        """`prepare` returns the objects that it has prepared before."""
        for rank, found in enumerate(self._facts(strategy_jobs.prepared_again, world)):
            for what, same in found.items():
                require(same, f"prepare() was given {what} again on rank {rank}, and returned another object.")

    def test_buffers_live(self, world: int) -> None:
        """BatchNorm counts and averages in training; an evaluation leaves its buffers alone."""
        for rank, (_, trained, evaluated, finite) in enumerate(self._facts(strategy_jobs.buffers, world)):
            require(finite, f"After two steps an evaluation is not finite on rank {rank}.")
            if trained:
                steps, mean = trained.get("norm.num_batches_tracked"), trained.get("norm.running_mean")
                require(
                    steps is not None and mean is not None and int(steps) == 2 and bool(mean.any()),
                    f"After two training steps, rank {rank} has num_batches_tracked={steps} and running_mean={mean} of the "
                    f"state {sorted(trained)}: buffers that the forward writes are the model's own.",
                )
                kept = trained if rank == 0 else {"norm.num_batches_tracked": trained["norm.num_batches_tracked"]}
                found = {name: evaluated[name] for name in kept}  # other ranks may take those of rank 0
                compare(found, kept, f"The state of rank {rank} after an evaluation", "It changes nothing", 0.0)

    def test_a_policy_holds_or_is_refused(self, world: int) -> None:
        """`prepare_model`: the declared dtypes are the observed ones, or it raises."""
        for rank, (count, found) in enumerate(self._facts(strategy_jobs.precisions, world)):
            for name, dtypes in found.items():
                if isinstance(dtypes, Raised):
                    require(bool(dtypes.message), f"A policy ({name}) was refused without a word:\n{dtypes.text}")
                    continue
                for what, expected in _expected_dtypes(name, count).items():
                    require(
                        dtypes[what] is expected,
                        f"Under {strategy_jobs.POLICIES[name]} on rank {rank}, {what} is {dtypes[what]}, expected "
                        f"{expected}. Honour the policy of the request (`accel_core.place_model` does, but for `reduce`), or raise.",
                    )

    def test_nothing_is_kept_alive(self, world: int) -> None:
        """All objects of a run that has ended are freed with its last reference."""
        self._require_freed(strategy_jobs.released, world)

    def test_the_process_exits_cleanly(self, world: int) -> None:
        """A script that ends with everything alive ends with status 0."""
        subject = self._subject(world)
        run_ranks(strategy_jobs.left_open, world, subject, timeout=self.timeout, devices=not subject.cpu)

    def _check_windows(self, job: Job, world: int, windows: Sequence[Sequence[int]]) -> None:
        for rank, (count, found) in enumerate(self._facts(job, world)):
            require(
                len(found) == len(windows),
                f"{len(windows)} windows were expected, and {len(found)} closed on rank {rank}.",
            )
            for micro_batches, gradients in zip(windows, found, strict=True):
                expected = models.reference_gradients(micro_batches, count)
                what = f"The gradient of micro-batches {list(micro_batches)} on rank {rank}"
                compare(gradients, expected, what, MEAN)

    def _check_tokens(
        self, job: Job, batches: Callable[[int], list[models.TokenBatch]], world: int, windows: int
    ) -> None:
        for rank, (count, gradients, loss) in enumerate(self._facts(job, world)):
            every = [batch for index in range(count) for batch in batches(index)]
            expected, mean = models.reference_token_gradients(every)
            what = f"The gradient of {windows} forward_backward() on rank {rank}"
            compare(gradients, _times(windows, expected), what, MEAN)
            require(
                abs(loss - mean) <= TOLERANCE * mean,
                f"forward_backward() returned {loss} on rank {rank}, expected {mean}: the weighted mean over all ranks.",
            )

    def _subject(self, world: int) -> Subject:  # noqa: ARG002
        return Subject(type(self).strategy, self.cpu, timedelta(seconds=self.patience))


def _given(states: Sequence[State]) -> list[tuple[int, State]]:
    """Ranks and states, without those that a strategy leaves empty."""
    return [(rank, state) for rank, state in enumerate(states) if state]


def _times(factor: float, gradients: Gradients) -> Gradients:
    return {name: gradient * factor for name, gradient in gradients.items()}


def _plus(first: Gradients, second: Gradients) -> Gradients:
    return {name: gradient + second[name] for name, gradient in first.items()}


def _clipped_reference(choice: str, count: int) -> tuple[float, Gradients]:
    model = models.built(models.FrozenBackbone if "frozen" in choice else models.Net)
    x, y = models.whole([0], count)
    torch.nn.functional.mse_loss(model(x), y).backward()
    chosen = [value for name, value in model.named_parameters() if choice != "the head" or name.startswith("head.")]
    norm = torch.nn.utils.clip_grad_norm_(chosen, *strategy_jobs.CLIPPED[choice])
    return float(norm), models.gradients(model)


def _expected_dtypes(policy: str, count: int) -> dict[str, torch.dtype]:
    narrow, wide = torch.bfloat16, torch.float32
    if policy == "compute":
        return {"compute": narrow, "output": wide, "parameters": wide, "integers": torch.int64}
    if policy == "param":
        return {"input": narrow, "compute": narrow, "output": wide, "parameters": narrow, "integers": torch.int64}
    travelled = {"gradients as they travelled": narrow} if count > 1 else {}
    return {"compute": wide, "output": wide, "parameters": wide, **travelled}


def compare(found: State, expected: State, what: str, rule: str, tolerance: float = TOLERANCE) -> None:
    """Fails unless names and values are equal, up to a relative error of each largest value."""
    require(
        found.keys() == expected.keys(),
        f"{what} has the names {sorted(found)}, expected {sorted(expected)}. {rule}.",
    )
    for name, tensor in expected.items():
        difference = (found[name].double() - tensor.double()).abs().max()
        error = float(difference / tensor.double().abs().max().clamp_min(1e-12))
        require(error <= tolerance, f"{what}: {name} is off by {error:.1e}{_factor(found[name], tensor)}. {rule}.")


def _factor(found: torch.Tensor, expected: torch.Tensor) -> str:
    """Says so when a tensor is a plain multiple of what it should be."""
    first, second = found.double().flatten(), expected.double().flatten()
    factor = float(first @ second / (second @ second).clamp_min(1e-30))
    plain = bool((first - factor * second).abs().max() <= 1e-5 * second.abs().max()) and abs(factor - 1) > 1e-4
    return f", being {factor:.4g} times what it should be" if plain else ""
