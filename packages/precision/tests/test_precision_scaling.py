"""Loss scaling: when the scale changes, what is left out, and what a step sees of the scale, which is nothing."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import StepLR

from accel_core import SKIPPED, Accelerator, World
from accel_precision import FP16, FP16True, GradScalerKwargs
from accel_precision.scaling import LossScaling
from accel_testing import run_ranks

OVERFLOW = 1e38
"""A factor of the loss that makes its gradients overflow once it is scaled too."""


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def rows(count: int = 8) -> torch.Tensor:
    return torch.randn(count, 3, generator=torch.Generator().manual_seed(1))


def full_precision(**options: Any) -> FP16:
    """Loss scaling and nothing else: no product in float16, so that results are those without scaling, bit by bit."""
    precision = FP16(output_dtype=None, **options)
    object.__setattr__(precision.policy, "compute", None)
    return precision


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def same(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


class Loop:
    """One model and one optimizer under loss scaling."""

    def __init__(self, precision: Any, accumulation: int = 1) -> None:
        self.accelerator = Accelerator(mixed_precision=precision, gradient_accumulation_steps=accumulation)
        self.scaling = precision.scaling if hasattr(precision, "scaling") else None
        self.model = net()
        self.optimizer = sgd(self.model)
        self.scheduler = StepLR(self.optimizer, 1, gamma=0.5)
        self.model, self.optimizer, self.scheduler = self.accelerator.prepare(
            self.model, self.optimizer, self.scheduler
        )

    def step(self, factor: float = 1.0, clip: float | None = None) -> torch.Tensor | None:
        norm = None
        self.accelerator.backward(self.model(rows()).pow(2).mean() * factor)
        if clip is not None:
            norm = self.accelerator.clip_grad_norm_(self.model.parameters(), clip)
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        return norm


def test_the_scale_grows_after_an_interval_without_overflow_and_shrinks_after_one() -> None:
    loop = Loop(full_precision(init_scale=8.0, growth_interval=2, growth_factor=4.0, backoff_factor=0.25))
    scales = []
    for factor in (1, 1, 1, OVERFLOW, 1, 1, 1):
        loop.step(factor)
        scales.append(loop.scaling.state_dict()["scale"])

    assert scales == [8.0, 32.0, 32.0, 8.0, 8.0, 32.0, 32.0]


def test_a_step_that_overflows_is_left_out_and_the_scheduler_is_held_back() -> None:
    loop = Loop(full_precision())
    before = weights(loop.model)

    loop.step(OVERFLOW)
    assert same(weights(loop.model), before)
    assert loop.accelerator.optimizer_step_was_skipped
    assert loop.optimizer.step_was_skipped
    assert loop.scheduler.get_last_lr() == [0.1]
    assert not loop.optimizer.state

    loop.step()
    assert not same(weights(loop.model), before)
    assert not loop.accelerator.optimizer_step_was_skipped
    assert loop.scheduler.get_last_lr() == [0.05]


def test_a_step_sees_nothing_of_the_scale() -> None:
    plain, scaled = Loop("no"), Loop(full_precision(init_scale=4.0, growth_interval=1))
    for _ in range(4):
        norms = [loop.step(clip=0.05) for loop in (plain, scaled)]
        assert torch.equal(*norms)

    assert scaled.scaling.value == 32.0
    assert same(weights(plain.model), weights(scaled.model))


def test_the_scale_is_the_same_for_all_micro_batches_of_a_window() -> None:
    def train(precision: Any) -> list[torch.Tensor]:
        loop = Loop(precision, accumulation=2)
        for _ in range(6):
            with loop.accelerator.accumulate(loop.model):
                loop.step()
        return weights(loop.model)

    assert same(train("no"), train(full_precision(growth_interval=1)))


def test_forward_backward_gives_the_gradients_of_a_run_without_scaling() -> None:
    def gradients(precision: Any) -> list[torch.Tensor]:
        loop = Loop(precision)
        loop.accelerator.forward_backward(
            loop.model, rows().chunk(2), lambda output, _: (output.pow(2).sum(), len(output))
        )
        loop.accelerator.unscale_gradients()
        loop.accelerator.unscale_gradients(loop.optimizer)
        return [parameter.grad for parameter in loop.model.parameters()]

    assert same(gradients("no"), gradients(full_precision()))


def test_a_loop_that_drops_what_is_not_finite_gets_a_smaller_scale_all_the_same() -> None:
    loop = Loop(full_precision(init_scale=1024.0))
    scales = []
    for _ in range(4):
        loop.accelerator.backward(loop.model(rows()).pow(2).mean() * OVERFLOW)
        if not loop.accelerator.clip_grad_norm_(loop.model.parameters(), 1.0).isfinite():
            loop.optimizer.zero_grad()
            scales.append(loop.scaling.value)

    assert scales == [1024.0, 512.0, 256.0, 128.0]


CLEARS = {
    "by the optimizer": lambda loop: loop.optimizer.zero_grad(),
    "to zeros": lambda loop: loop.optimizer.zero_grad(set_to_none=False),
    "by the model": lambda loop: loop.model.zero_grad(),
    "by hand": lambda loop: [setattr(each, "grad", None) for each in loop.model.parameters()],
}


@pytest.mark.parametrize("clips", [True, False])
@pytest.mark.parametrize("clear", CLEARS)
def test_a_step_that_is_skipped_by_hand_leaves_nothing_behind(clear: str, clips: bool) -> None:
    """Whoever clears the gradients, and whether the next step is clipped or not."""

    def train(precision: Any) -> list[torch.Tensor]:
        loop = Loop(precision)
        for _ in range(2):
            loop.accelerator.backward(loop.model(rows()).pow(2).mean())
            loop.accelerator.clip_grad_norm_(loop.model.parameters(), 0.05)
            CLEARS[clear](loop)
            loop.step(clip=0.05 if clips else None)
        return weights(loop.model)

    assert same(train("no"), train(full_precision(growth_interval=1)))


def test_a_window_that_is_dropped_by_hand_leaves_nothing_behind() -> None:
    def train(precision: Any) -> list[torch.Tensor]:
        loop = Loop(precision)
        for number in range(4):
            window(loop.accelerator, loop.model)
            loop.accelerator.clip_grad_norm_(loop.model.parameters(), 0.05)
            if number % 2:
                loop.optimizer.step()
            loop.model.zero_grad()
        return weights(loop.model)

    assert same(train("no"), train(full_precision(init_scale=4.0, growth_interval=1)))


def test_a_norm_behind_the_step_says_nothing_of_the_next_gradients() -> None:
    def train(precision: Any) -> list[torch.Tensor]:
        loop = Loop(precision)
        for _ in range(2):
            loop.accelerator.backward(loop.model(rows()).pow(2).mean())
            loop.accelerator.clip_grad_norm_(loop.model.parameters(), 0.05)
            loop.optimizer.step()
            loop.accelerator.clip_grad_norm_(loop.model.parameters(), float("inf"))
            loop.model.zero_grad()
        return weights(loop.model)

    assert same(train("no"), train(full_precision()))


MIXED = r"gradients of SGD were unscaled, .* and then a backward added others, .*Clip after the last backward"


@pytest.mark.parametrize("added", ["backward", "window"])
@pytest.mark.parametrize("then", ["clip", "unscale", "step"])
def test_gradients_that_are_added_to_unscaled_ones_are_refused(added: str, then: str) -> None:
    loop = Loop(full_precision())
    calls = {
        "clip": lambda: loop.accelerator.clip_grad_norm_(loop.model.parameters(), 1.0),
        "unscale": loop.accelerator.unscale_gradients,
        "step": loop.optimizer.step,
    }
    before = weights(loop.model)
    loop.accelerator.backward(loop.model(rows()).pow(2).mean())
    loop.accelerator.unscale_gradients()
    for _ in range(2):
        if added == "window":
            window(loop.accelerator, loop.model)
        else:
            loop.accelerator.backward(loop.model(rows()).pow(2).mean())
    for _ in range(2):
        with pytest.raises(RuntimeError, match=MIXED):
            calls[then]()
    assert same(weights(loop.model), before)

    loop.optimizer.zero_grad()
    plain = Loop("no")
    for each in (loop, plain):
        each.step(clip=0.05)
    assert same(weights(loop.model), weights(plain.model))


def test_clipping_after_the_step_leaves_the_gradients_alone() -> None:
    loop = Loop(full_precision())
    loop.accelerator.backward(loop.model(rows()).pow(2).mean())
    first = loop.accelerator.clip_grad_norm_(loop.model.parameters(), 100.0)
    loop.optimizer.step()

    assert torch.equal(loop.accelerator.clip_grad_norm_(loop.model.parameters(), 100.0), first)


def window(accelerator: Accelerator, model: nn.Module) -> None:
    accelerator.forward_backward(model, rows().chunk(2), lambda output, _: (output.pow(2).sum(), len(output)))


class Pair:
    """Two models, each with an optimizer, in one Accelerator."""

    def __init__(self, precision: Any) -> None:
        self.accelerator = Accelerator(mixed_precision=precision)
        self.scaling = getattr(precision, "scaling", None)
        self.models = [net(), net()]
        prepared = self.accelerator.prepare(*self.models, *map(sgd, self.models))
        self.models, self.optimizers = list(prepared[:2]), prepared[2:]

    def backward(self, number: int, factor: float = 1.0) -> None:
        self.accelerator.backward(self.models[number](rows()).pow(2).mean() * factor)

    def step(self, number: int) -> bool:
        self.optimizers[number].step()
        self.optimizers[number].zero_grad()
        return self.optimizers[number].step_was_skipped

    def weights(self) -> list[torch.Tensor]:
        return [each for model in self.models for each in weights(model)]


def test_optimizers_that_step_together_give_one_update() -> None:
    pair = Pair(full_precision(init_scale=8.0, growth_interval=2))
    for expected in (8.0, 16.0):
        pair.backward(0)
        pair.backward(1)
        assert not pair.step(0)
        assert not pair.step(1)
        assert pair.scaling.state_dict()["scale"] == expected


def test_an_overflow_of_one_optimizer_leaves_out_its_step_alone() -> None:
    pair = Pair(full_precision(init_scale=8.0))
    pair.backward(0, OVERFLOW)
    pair.backward(1)

    assert [pair.step(0), pair.step(1)] == [True, False]
    assert pair.accelerator.optimizer_step_was_skipped
    assert pair.scaling.state_dict() == {"scale": 4.0, "growth_tracker": 0}


def alternate(pair: Pair, turns: str) -> list[torch.Tensor]:
    """Backwards and steps by number: `a` and `b` are backwards of the two, `A` and `B` their steps."""
    for turn in turns:
        if turn.islower():
            pair.backward("ab".index(turn))
        else:
            pair.step("AB".index(turn))
    return pair.weights()


@pytest.mark.parametrize("turns", ["aAbB" * 3, "abAB" * 3, "aAaAbB" * 2, "abAaAB" * 3, "abAabAB" * 2, "abAaAaAB"])
def test_whatever_the_turns_of_two_optimizers_a_step_sees_nothing_of_the_scale(turns: str) -> None:
    """`abA`: the second waits with a gradient of the old scale, while the first goes on."""
    growing = full_precision(init_scale=4.0, growth_interval=1)

    assert same(alternate(Pair("no"), turns), alternate(Pair(growing), turns))
    assert growing.scaling.value > 4.0


def test_gradients_that_are_unscaled_wait_for_their_step_as_they_are() -> None:
    def train(precision: Any) -> list[torch.Tensor]:
        pair = Pair(precision)
        for _ in range(2):
            pair.backward(0)
            pair.backward(1)
            pair.accelerator.clip_grad_norm_(pair.models[1].parameters(), 0.05)
            pair.step(0)
            pair.backward(0)
            pair.step(0)
            pair.step(1)
        return pair.weights()

    assert same(train("no"), train(full_precision(init_scale=4.0, growth_interval=1)))


@pytest.mark.parametrize("clips", [True, False])
def test_gradients_wait_for_their_step_while_another_optimizer_has_a_window(clips: bool) -> None:
    """Those that are unscaled stay as they are, and the others follow the scale, which changes meanwhile."""

    def train(precision: Any) -> list[torch.Tensor]:
        pair = Pair(precision)
        for _ in range(2):
            pair.backward(0)
            window(pair.accelerator, pair.models[1])
            if clips:
                pair.accelerator.clip_grad_norm_(pair.models[1].parameters(), 0.05)
            pair.step(0)
            window(pair.accelerator, pair.models[0])
            pair.step(0)
            if clips:
                nn.utils.clip_grad_value_(pair.models[1].parameters(), 0.01)  # of the user, who may
            pair.step(1)
        return pair.weights()

    assert same(train("no"), train(full_precision(init_scale=4.0, growth_interval=1)))


def test_optimizers_by_turns_may_all_be_unscaled_at_each_turn() -> None:
    """One of them has no gradients then."""

    def train(precision: Any) -> list[torch.Tensor]:
        pair = Pair(precision)
        for _ in range(3):
            for number in range(2):
                pair.backward(number)
                pair.accelerator.unscale_gradients()
                pair.step(number)
        return pair.weights()

    assert same(train("no"), train(full_precision(init_scale=4.0, growth_interval=1)))


@pytest.mark.parametrize("clips", [True, False])
def test_a_rank_whose_losses_are_scaled_elsewhere_keeps_up_with_the_scale(clips: bool) -> None:
    """As a stage of a pipeline does: it runs backwards, but has no loss."""
    plain, stage = Loop("no"), Loop(full_precision(init_scale=4.0, growth_interval=1))
    for step in range(3):
        for loop, scale in ((plain, 1.0), (stage, 4.0 * 2**step)):
            loop.accelerator._accumulation.count_backward()
            (loop.model(rows()).pow(2).mean() * scale).backward()
            if clips:
                loop.accelerator.clip_grad_norm_(loop.model.parameters(), 0.05)
            loop.optimizer.step()
            loop.optimizer.zero_grad()

    assert same(weights(plain.model), weights(stage.model))


@pytest.mark.parametrize("clips", [True, False])
def test_such_a_rank_keeps_up_where_steps_are_skipped_by_hand(clips: bool) -> None:
    plain, stage = Loop("no"), Loop(full_precision(init_scale=4.0, growth_interval=1))
    for step in range(6):
        for loop, scale in ((plain, 1.0), (stage, 4.0 * 2**step)):
            skips = step % 3 == 0
            loop.accelerator._accumulation.count_backward()
            (loop.model(rows()).pow(2).mean() * scale).backward()
            if clips or skips:
                loop.accelerator.clip_grad_norm_(loop.model.parameters(), 0.05)
            if not skips:
                loop.optimizer.step()
            loop.optimizer.zero_grad()

    assert same(weights(plain.model), weights(stage.model))


def test_an_optimizer_without_gradients_steps() -> None:
    scaling = LossScaling(GradScalerKwargs())
    scaling.scale(torch.ones(()))
    optimizer = torch.optim.SGD([torch.zeros(2, requires_grad=True)], lr=0.1)

    assert scaling.step(optimizer, lambda: "stepped") == "stepped"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.complex64])
@pytest.mark.parametrize("value", [3.0, float("inf"), float("nan")])
def test_gradients_of_every_dtype_are_unscaled_and_searched(dtype: torch.dtype, value: float) -> None:
    scaling = LossScaling(GradScalerKwargs(init_scale=4.0))
    scaling.scale(torch.ones(()))
    parameter = torch.zeros(2, dtype=dtype, requires_grad=True)
    parameter.grad = torch.tensor([2.0, value]).to(dtype)
    result = scaling.step(torch.optim.SGD([parameter], lr=0.1), lambda: "stepped")

    assert parameter.grad[0] == 0.5
    assert result == "stepped" if value == 3.0 else result is SKIPPED


@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled:UserWarning")
def test_entries_of_a_sparse_gradient_are_added_before_they_are_searched() -> None:
    scaling = LossScaling(GradScalerKwargs(init_scale=2.0))
    scaling.scale(torch.ones(()))
    table = torch.zeros(4, 1, dtype=torch.float16, requires_grad=True)
    optimizer = torch.optim.SGD([table], lr=0.1)

    table.grad = torch.sparse_coo_tensor([[1, 1]], torch.tensor([[2.0], [4.0]], dtype=torch.float16), (4, 1))
    assert scaling.step(optimizer, lambda: "stepped") == "stepped"
    assert table.grad.to_dense().flatten().tolist() == [0.0, 3.0, 0.0, 0.0]

    scaling.scale(torch.ones(()))
    table.grad = torch.sparse_coo_tensor([[1, 1]], torch.full((2, 1), 40000.0, dtype=torch.float16), (4, 1))
    assert scaling.step(optimizer, lambda: "stepped") is SKIPPED


def test_a_closure_is_refused() -> None:
    loop = Loop(FP16())
    loop.accelerator.backward(loop.model(rows()).pow(2).mean())

    with pytest.raises(RuntimeError, match=r"SGD.step\(\) was called with arguments under loss scaling"):
        loop.optimizer.step(lambda: None)


def test_an_optimizer_that_steps_during_the_backward_is_refused() -> None:
    class Fused(torch.optim.SGD):
        def fused_backward(self, loss: torch.Tensor, lr: float) -> None:
            raise AssertionError("loss scaling does not reach what happens here")

    accelerator = Accelerator(mixed_precision=FP16())
    model = net()
    model, _ = accelerator.prepare(model, Fused(model.parameters(), lr=0.1))

    with pytest.raises(RuntimeError, match="The hook 'scale_loss' is taken over by the precision 'FP16'"):
        accelerator.backward(model(rows()).pow(2).mean(), learning_rate=0.1)


def test_disabled_scaling_leaves_losses_and_steps_alone() -> None:
    loop = Loop(full_precision(enabled=False))
    before = weights(loop.model)
    loop.step(float("inf"), clip=1.0)

    assert not loop.accelerator.optimizer_step_was_skipped
    assert not same(weights(loop.model), before)
    assert loop.scaling.value == 1.0
    assert loop.scaling.state_dict() == {}
    assert str(loop.scaling) == "off"


def test_asking_for_the_state_changes_nothing() -> None:
    loop = Loop(full_precision(init_scale=8.0, growth_interval=1))
    loop.step()

    assert loop.scaling.state_dict() == loop.scaling.state_dict() == {"scale": 16.0, "growth_tracker": 0}
    assert loop.scaling.value == 8.0
    loop.accelerator.backward(loop.model(rows()).mean())
    assert loop.scaling.value == 16.0


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))])
@pytest.mark.parametrize("kind", [FP16, FP16True])
def test_a_copy_has_the_state_and_the_options(copied: Any, kind: Any) -> None:
    precision = kind(init_scale=8.0, growth_interval=3)
    loop = Loop(precision)
    loop.step()
    twin = copied(precision)

    assert twin.scaling.state_dict() == {"scale": 8.0, "growth_tracker": 1}
    assert twin.scaling.options == GradScalerKwargs(init_scale=8.0, growth_interval=3)
    assert twin.policy == precision.policy
    twin.scaling.load_state_dict({"scale": 2.0, "growth_tracker": 0})
    assert precision.scaling.state_dict()["scale"] == 8.0


def test_a_scale_goes_on_where_it_was_saved_by_the_options_that_are_given_now() -> None:
    scaling = LossScaling(GradScalerKwargs(growth_interval=2, growth_factor=8.0))
    scaling.load_state_dict({"scale": 4.0, "growth_tracker": 700})
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)

    assert scaling.scale(torch.ones(3)).tolist() == [4.0, 4.0, 4.0]
    scaling.step(optimizer, lambda: None)
    assert scaling.scale(torch.ones(())) == 32.0


def test_what_overflowed_before_a_state_was_loaded_is_forgotten() -> None:
    loop = Loop(full_precision())
    loop.step(OVERFLOW)
    loop.scaling.load_state_dict({"scale": 8.0, "growth_tracker": 0})
    loop.step()

    assert loop.scaling.state_dict() == {"scale": 8.0, "growth_tracker": 1}


@pytest.mark.parametrize(
    ("options", "state", "says"),
    [
        ({"enabled": False}, {"scale": 4.0, "growth_tracker": 1}, r"loss scale of 4.0 .* scaling is off here"),
        ({}, {}, "found nothing, as a run with enabled=False saves it"),
        ({}, {"scale": 4.0}, "which has the keys growth_tracker, scale; found the keys scale"),
    ],
)
def test_a_state_that_does_not_fit_is_refused(options: dict[str, Any], state: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        LossScaling(GradScalerKwargs(**options)).load_state_dict(state)


@pytest.mark.parametrize("kind", [GradScalerKwargs, FP16, FP16True])
@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"init_scale": 0.0}, ValueError, r"\(init_scale=0.0\): expected 0 < init_scale < inf"),
        ({"init_scale": float("nan")}, ValueError, "expected 0 < init_scale < inf"),
        ({"growth_factor": 1.0}, ValueError, "expected 1 < growth_factor < inf"),
        ({"backoff_factor": 1.0}, ValueError, "expected 0 < backoff_factor < 1"),
        ({"backoff_factor": -0.5}, ValueError, "expected 0 < backoff_factor < 1"),
        ({"growth_interval": 0}, ValueError, "expected growth_interval >= 1"),
        ({"growth_interval": 2.0}, TypeError, "is a float: expected an integer, a number of steps"),
        ({"init_scale": "big"}, TypeError, r"\(init_scale='big'\) is a str: expected a number"),
        ({"enabled": 1}, TypeError, r"\(enabled=1\) is a int: expected True or False"),
    ],
)
def test_options_out_of_range_are_refused_at_once(kind: Any, options: Any, error: Any, says: str) -> None:
    with pytest.raises(error, match=says):
        kind(**options)


def test_everything_dies_with_the_last_reference() -> None:
    loop = Loop(FP16())
    loop.step()
    watched = weakref.ref(loop.scaling), weakref.ref(loop.optimizer)
    del loop
    gc.collect()

    assert [each() for each in watched] == [None, None]


def sharded() -> dict[str, Any]:
    """Gradients that lie on two ranks: DTensors over two meshes beside plain ones."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    world = World.current()
    both = init_device_mesh("cpu", (2,))
    grid = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
    found: dict[str, Any] = {}

    def leaves(overflows: bool) -> list[torch.Tensor]:
        values = torch.full((4,), 8.0)
        values[-1] = float("inf") if overflows else 8.0  # on the last rank only
        gradients = [
            distribute_tensor(values, both, [Shard(0)]),
            distribute_tensor(torch.full((1,), 8.0), grid, [Replicate(), Shard(0)]),  # the last rank has nothing of it
            distribute_tensor(torch.full((2,), 8.0), both, [Replicate()]),
            torch.full((2,), 8.0),
        ]
        parameters = [torch.zeros_like(gradient, requires_grad=True) for gradient in gradients]
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        return parameters

    scaling = LossScaling(GradScalerKwargs(init_scale=4.0))
    scaling.start(world, replicated=False)
    parameters = leaves(overflows=False)
    optimizer = torch.optim.SGD(parameters, lr=0.5, foreach=False)
    found["scaled"] = scaling.scale(distribute_tensor(torch.ones(()), both, [Replicate()])).full_tensor().item()
    scaling.step(optimizer, optimizer.step)
    found["whole"] = [
        (each.full_tensor() if hasattr(each, "full_tensor") else each).tolist()
        for each in map(torch.detach, parameters)
    ]

    scaling.scale(torch.ones(()))
    for parameter, other in zip(parameters, leaves(overflows=True), strict=True):
        parameter.grad = other.grad
    found["left out"] = scaling.step(optimizer, lambda: "stepped") is SKIPPED
    found["scale"] = scaling.state_dict()["scale"]

    replicated = LossScaling(GradScalerKwargs())
    replicated.start(world, replicated=True)
    replicated.scale(torch.ones(()))
    if world.rank == 0:  # alone: a collective would never end
        found["alone"] = replicated.step(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1), lambda: "stepped")
    dist.barrier()
    return found


@pytest.fixture(scope="module")
def on_two_ranks() -> list[dict[str, Any]]:
    return run_ranks(sharded, 2)


def test_sharded_gradients_of_several_meshes_are_unscaled_beside_plain_ones(on_two_ranks: Any) -> None:
    for found in on_two_ranks:
        assert found["scaled"] == 4.0
        assert found["whole"] == [[-1.0] * 4, [-1.0], [-1.0] * 2, [-1.0] * 2]


def test_all_ranks_leave_a_step_out_if_the_shard_of_one_overflows(on_two_ranks: Any) -> None:
    assert [(found["left out"], found["scale"]) for found in on_two_ranks] == [(True, 2.0)] * 2


def test_no_collective_runs_where_all_ranks_see_the_same_gradients(on_two_ranks: Any) -> None:
    assert on_two_ranks[0]["alone"] == "stepped"
