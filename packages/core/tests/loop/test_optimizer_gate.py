"""Gated optimizers and schedulers: held back while a window is open, and otherwise what they were."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, ReduceLROnPlateau

from accel_core import SKIPPED, Accelerator, GradientAccumulationPlugin, Precision, hookimpl
from accel_core.api.precision import SkippedIf


def line() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(2, 1, bias=False)


X = torch.tensor([[1.0, 2.0], [3.0, -1.0], [0.5, 0.5], [2.0, 2.0]])


def reference_step(batches: list[torch.Tensor], lr: float = 0.1) -> torch.Tensor:
    model = line()
    (sum(model(x).pow(2).mean() for x in batches) / len(batches)).backward()  # type: ignore[union-attr]
    with torch.no_grad():
        return model.weight - lr * model.weight.grad  # type: ignore[operator]


@pytest.mark.parametrize(
    "zero_grad", ["first in the body", "last in the body", "before accumulate", "after accumulate"]
)
def test_zero_grad_may_stand_anywhere_in_the_body(zero_grad: str) -> None:
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model = line()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    for x in X[:2]:
        if zero_grad == "before accumulate":
            optimizer.zero_grad()
        with accelerator.accumulate(model):
            if zero_grad == "first in the body":
                optimizer.zero_grad()
            accelerator.backward(model(x).pow(2).mean())
            optimizer.step()
            if zero_grad == "last in the body":
                optimizer.zero_grad()
        if zero_grad == "after accumulate":
            optimizer.zero_grad()
    torch.testing.assert_close(model.weight, reference_step([X[0], X[1]]))


def test_a_step_outside_the_block_waits_for_the_window_too() -> None:
    """Scripts place `optimizer.step()` and tests of `sync_gradients` behind the block."""
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model = line()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    assert accelerator.sync_gradients
    steps = []
    for x in X[:2]:
        with accelerator.accumulate(model):
            accelerator.backward(model(x).pow(2).mean())
        optimizer.step()
        optimizer.zero_grad()
        steps.append(accelerator.sync_gradients)
    assert steps == [False, True]
    torch.testing.assert_close(model.weight, reference_step([X[0], X[1]]))


def test_gradients_are_dropped_when_the_step_of_a_closing_window_is_left_out() -> None:
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model = line()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    for index, x in enumerate(X):
        with accelerator.accumulate(model):
            accelerator.backward(model(x).pow(2).mean())
            if index >= 2:
                optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(model.weight, reference_step([X[2], X[3]]))


@pytest.mark.parametrize("first", [True, False])
def test_two_optimizers_may_clear_first_or_last(first: bool) -> None:
    """On the closing micro-batch one optimizer's backward has run before the other clears."""
    accelerator = Accelerator(gradient_accumulation_steps=2)
    one, other = line(), line()
    one, one_optimizer = accelerator.prepare(one, torch.optim.SGD(one.parameters(), lr=0.1))
    other, other_optimizer = accelerator.prepare(other, torch.optim.SGD(other.parameters(), lr=0.1))
    for x in X[:2]:
        with accelerator.accumulate(one, other):
            for model, optimizer in ((one, one_optimizer), (other, other_optimizer)):
                if first:
                    optimizer.zero_grad()
                accelerator.backward(model(x).pow(2).mean())
                optimizer.step()
                if not first:
                    optimizer.zero_grad()
    torch.testing.assert_close(one.weight, reference_step([X[0], X[1]]))
    torch.testing.assert_close(other.weight, one.weight)


@pytest.mark.parametrize("where", ["inside the block", "behind the block"])
def test_a_closing_micro_batch_may_be_retried(where: str) -> None:
    """What zero_grad drops after a backward is gone before the next one."""
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model = line()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with accelerator.accumulate(model):
        accelerator.backward(model(X[0]).pow(2).mean())
    with accelerator.accumulate(model):
        accelerator.backward(model(X[1]).sum() * float("nan"))
        optimizer.zero_grad()
        if where == "inside the block":
            accelerator.backward(model(X[1]).pow(2).mean())
            optimizer.step()
    if where == "behind the block":
        accelerator.backward(model(X[1]).pow(2).mean())
        optimizer.step()
    assert model.weight.isfinite().all()


def test_clearing_instead_of_a_step_after_unscaling_is_not_forgotten() -> None:
    """The next gradients are unscaled too, or the scaler says why not."""
    accelerator = Accelerator(mixed_precision=Scaling())
    model = line()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    accelerator.backward(model(X[0]).pow(2).mean())
    accelerator.clip_grad_norm_(model.parameters(), 1e9)
    optimizer.zero_grad()
    accelerator.backward(model(X[0]).pow(2).mean())
    with pytest.raises(RuntimeError, match="has already been called"):
        accelerator.clip_grad_norm_(model.parameters(), 1e9)


def test_a_closure_under_accumulation_is_refused() -> None:
    """Only the closure of the closing micro-batch would ever be called."""
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model = line()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(
        RuntimeError, match=r"step\(closure\) was called in a window of 2 .*gradient_accumulation_steps=1"
    ):
        for x in X[:2]:
            with accelerator.accumulate(model):
                optimizer.step(lambda x=x: model(x).pow(2).mean())


def test_outside_accumulate_everything_acts_and_backward_divides() -> None:
    """Outside `accumulate`, `backward` divides by `gradient_accumulation_steps`."""
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model = line()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator.backward(model(X[0]).pow(2).mean())
    accelerator.backward(model(X[1]).pow(2).mean())
    optimizer.step()
    torch.testing.assert_close(model.weight, reference_step([X[0], X[1]]))
    optimizer.zero_grad()
    assert model.weight.grad is None


def test_a_plain_backward_trains_where_nothing_is_scaled() -> None:
    accelerator = Accelerator()
    model = line()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    with accelerator.accumulate(model):
        model(X[0]).pow(2).mean().backward()
        optimizer.step()
    torch.testing.assert_close(model.weight, reference_step([X[0]]))


def test_a_plain_backward_under_accumulation_is_refused_at_the_step() -> None:
    accelerator = Accelerator(gradient_accumulation_steps=1 + 1)
    model = line()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    with pytest.raises(
        RuntimeError,
        match=r"step\(\) was called, but no accelerator.backward\(loss\) ran in this window of 2 micro-batches: .*"
        r"Replace loss.backward\(\) by accelerator.backward\(loss\)",
    ):
        for x in X[:2]:
            with accelerator.accumulate(model):
                model(x).pow(2).mean().backward()
                optimizer.step()


def test_a_plain_backward_is_refused_at_a_step_behind_the_block_too() -> None:
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model = line()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for x in X[:2]:
        with accelerator.accumulate(model):
            model(x).pow(2).mean().backward()
    with pytest.raises(RuntimeError, match=r"no accelerator.backward\(loss\) ran in this window of 2"):
        optimizer.step()


def test_a_step_may_be_repeated_without_another_backward() -> None:
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model = line()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for x in X[:2]:
        with accelerator.accumulate(model):
            accelerator.backward(model(x).pow(2).mean())
            optimizer.step()
    optimizer.step()


def test_an_optimizer_of_an_accelerator_that_is_gone_is_taken_over() -> None:
    """A notebook's cell that is run again."""
    model = line()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    Accelerator().prepare(model, optimizer)
    gc.collect()
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model, optimizer = accelerator.prepare(model, optimizer)
    for x in X[:2]:
        with accelerator.accumulate(model):
            accelerator.backward(model(x).pow(2).mean())
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(model.weight, reference_step([X[0], X[1]]))


def test_an_optimizer_of_another_accelerator_is_refused() -> None:
    """Two windows cannot hold one optimizer back."""
    first, second = Accelerator(), Accelerator(gradient_accumulation_steps=2)
    optimizer = first.prepare(torch.optim.SGD(line().parameters(), lr=0.1))
    with pytest.raises(
        ValueError, match=r"This SGD is prepared by another Accelerator.*call its free_memory\(\) first"
    ):
        second.prepare(optimizer)
    first.free_memory()
    assert second.prepare(optimizer) is optimizer


@pytest.mark.parametrize("option", ["fused", "capturable", None])
def test_steps_of_kernels_that_read_them_on_the_device_go_there(option: str | None) -> None:
    parameter = torch.nn.Parameter(torch.empty(2, device="meta"))
    optimizer = torch.optim.AdamW([parameter])
    optimizer.state[parameter] = {"step": torch.tensor(1.0), "exp_avg": torch.zeros(2)}
    if option:
        optimizer.param_groups[0][option] = True
    Accelerator().prepare_optimizer(optimizer)
    state = optimizer.state[parameter]
    assert (state["step"].device.type, state["exp_avg"].device.type) == ("meta" if option else "cpu", "meta")


def test_a_closure_runs_its_own_backward() -> None:
    accelerator = Accelerator()
    model = line()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
    model, optimizer = accelerator.prepare(model, optimizer)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(X).pow(2).mean()
        accelerator.backward(loss)
        return loss

    before = model(X).pow(2).mean().item()
    assert optimizer.step(closure) is not None
    assert model(X).pow(2).mean().item() < before


@pytest.mark.parametrize("order", ["optimizer first", "scheduler first", "scheduler built after prepare"])
def test_schedulers_and_optimizers_in_any_order(order: str) -> None:
    """LR schedulers capture `optimizer.step` when they are built, and look for their mark on it."""
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model = line()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    if order == "scheduler built after prepare":
        optimizer = accelerator.prepare(optimizer)
        scheduler = LambdaLR(optimizer, lambda step: 1 / (step + 1))
    else:
        scheduler = LambdaLR(optimizer, lambda step: 1 / (step + 1))
    objects = [optimizer, scheduler] if order == "optimizer first" else [scheduler, optimizer]
    for each in objects:
        accelerator.prepare(each)
    model = accelerator.prepare(model)
    rates = []
    for x in [*X, *X]:
        with accelerator.accumulate(model):
            accelerator.backward(model(x).pow(2).mean())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        rates.append(scheduler.get_last_lr()[0])
    assert rates == pytest.approx([1, 1 / 2, 1 / 2, 1 / 3, 1 / 3, 1 / 4, 1 / 4, 1 / 5])


def test_the_scheduler_state_holds_nothing_of_ours_and_resumes_in_a_bare_one() -> None:
    accelerator = Accelerator()
    optimizer = torch.optim.SGD(line().parameters(), lr=1.0)
    bare = LambdaLR(torch.optim.SGD(line().parameters(), lr=1.0), lambda step: 1.0)
    scheduler = accelerator.prepare(LambdaLR(optimizer, lambda step: 1.0))
    assert scheduler.state_dict().keys() == bare.state_dict().keys()
    assert isinstance(scheduler, LambdaLR)


def drive(accelerator: Accelerator, make_scheduler: Any, batches: int) -> list[float]:
    model = line()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = make_scheduler(optimizer)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    for index in range(batches):
        with accelerator.accumulate(model):
            accelerator.backward(model(X[index % 4]).pow(2).mean() * 0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    return [scheduler.last_epoch]


def counting(optimizer: torch.optim.Optimizer) -> LambdaLR:
    return LambdaLR(optimizer, lambda step: 1.0)


def test_adjust_scheduler_given_explicitly_advances_by_micro_batches() -> None:
    plain = GradientAccumulationPlugin(num_steps=4)
    adjusted = GradientAccumulationPlugin(num_steps=4, adjust_scheduler=True)
    assert drive(Accelerator(gradient_accumulation_plugin=plain), counting, 8) == [2]
    assert drive(Accelerator(gradient_accumulation_plugin=adjusted), counting, 8) == [8]


def test_adjust_scheduler_counts_micro_batches_behind_the_block_too() -> None:
    plugin = GradientAccumulationPlugin(num_steps=4, adjust_scheduler=True)
    accelerator = Accelerator(gradient_accumulation_plugin=plugin)
    model = line()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, counting(optimizer))
    for x in X:
        with accelerator.accumulate(model):
            accelerator.backward(model(x).pow(2).mean())
        optimizer.step()
        scheduler.step()
    assert scheduler.last_epoch == 4


@pytest.mark.parametrize(
    ("options", "asked"),
    [
        ({"step_scheduler_per_process": True}, None),
        (
            {"gradient_accumulation_plugin": GradientAccumulationPlugin(2, adjust_scheduler=True)},
            "adjust_scheduler=True",
        ),
    ],
)
def test_a_scheduler_that_is_left_alone_cannot_be_multiplied(options: dict[str, Any], asked: str | None) -> None:
    asked = asked or "step_scheduler_per_process=True"
    with pytest.raises(
        ValueError, match=f"leaves scheduler.step.. alone, and {asked} multiplies it. Leave one of them"
    ):
        Accelerator(step_scheduler_with_optimizer=False, **options)


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")  # torch's own remark on what this test does
def test_step_scheduler_with_optimizer_false_is_never_held_back() -> None:
    accelerator = Accelerator(gradient_accumulation_steps=4, step_scheduler_with_optimizer=False)
    assert drive(accelerator, counting, 8) == [8]


def test_repeated_steps_do_not_run_over_the_end_of_a_schedule() -> None:
    plugin = GradientAccumulationPlugin(num_steps=4, adjust_scheduler=True)

    def one_cycle(optimizer: torch.optim.Optimizer) -> OneCycleLR:
        return OneCycleLR(optimizer, max_lr=1.0, total_steps=6)

    assert drive(Accelerator(gradient_accumulation_plugin=plugin), one_cycle, 8) == [5]


def test_a_schedule_that_was_counted_per_process_stays_at_its_end_in_one_process_too() -> None:
    """As in a larger world, so that a script behaves alike; without the option it raises in any world, as torch does."""

    def one_cycle(optimizer: torch.optim.Optimizer) -> OneCycleLR:
        return OneCycleLR(optimizer, max_lr=1.0, total_steps=3)

    assert drive(Accelerator(step_scheduler_per_process=True), one_cycle, 6) == [2]
    with pytest.raises(ValueError, match="Tried to step 4 times"):
        drive(Accelerator(), one_cycle, 6)


def test_a_scheduler_that_takes_a_metric_gets_it() -> None:
    accelerator = Accelerator()
    model = line()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    for _ in range(3):
        accelerator.backward(model(X).pow(2).mean())
        optimizer.step()
        scheduler.step(1.0)
    assert optimizer.param_groups[0]["lr"] == 0.25


def test_a_prepared_optimizer_tells_whether_its_own_step_was_skipped() -> None:
    accelerator = Accelerator(mixed_precision=Scaling())
    one, other = line(), line()
    one, first = accelerator.prepare(one, torch.optim.SGD(one.parameters(), lr=0.1))
    other, second = accelerator.prepare(other, torch.optim.SGD(other.parameters(), lr=0.1))
    assert first.step_was_skipped is False
    for model, optimizer, factor in ((one, first, float("inf")), (other, second, 1.0)):
        accelerator.backward(model(X[0]).sum() * factor)
        optimizer.step()
    assert (first.step_was_skipped, second.step_was_skipped) == (True, False)
    first.zero_grad()
    accelerator.backward(one(X[0]).sum())
    first.step()
    assert first.step_was_skipped is False
    accelerator.free_memory()
    assert not hasattr(first, "step_was_skipped")


class Scaling(Precision):
    """Loss scaling as torch does it: the scaler itself calls `optimizer.step()`."""

    def __init__(self, scale: float = 1024.0) -> None:
        self.scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=10**6)
        self.unscaled = 0

    @hookimpl
    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        return self.scaler.scale(loss)

    @hookimpl
    def unscale_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        self.unscaled += 1
        self.scaler.unscale_(optimizer)

    @hookimpl
    def optimizer_step(self, optimizer: torch.optim.Optimizer) -> Any:
        before = self.scaler.get_scale()
        result = self.scaler.step(optimizer)
        self.scaler.update()
        return SKIPPED if self.scaler.get_scale() < before else result


def test_a_scaler_that_calls_step_reaches_the_optimizers_own() -> None:
    accelerator = Accelerator(mixed_precision=Scaling(), gradient_accumulation_steps=2)
    model = line()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    for x in X[:2]:
        with accelerator.accumulate(model):
            accelerator.backward(model(x).pow(2).mean())
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(model.weight, reference_step([X[0], X[1]]))


def test_unscaling_twice_is_once_and_clipping_unscales_first() -> None:
    precision = Scaling()
    accelerator = Accelerator(mixed_precision=precision)
    model = line()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    accelerator.backward(model(X[0]).pow(2).mean())
    norm = accelerator.clip_grad_norm_(model.parameters(), 1e9)
    accelerator.unscale_gradients()
    accelerator.unscale_gradients(optimizer)
    assert precision.unscaled == 1
    bare = line()
    bare(X[0]).pow(2).mean().backward()
    torch.testing.assert_close(norm, bare.weight.grad.norm())  # type: ignore[union-attr]
    optimizer.step()
    accelerator.backward(model(X[0]).pow(2).mean())
    accelerator.unscale_gradients(optimizer)
    assert precision.unscaled == 2


def test_an_overflow_holds_the_scheduler_back_and_is_reported() -> None:
    """As `optimizer_step_was_skipped` says."""
    accelerator = Accelerator(mixed_precision=Scaling())
    model = line()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = LambdaLR(optimizer, lambda step: 1.0)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    before = model.weight.detach().clone()
    accelerator.backward(model(X[0]).sum() * float("inf"))
    optimizer.step()
    scheduler.step()
    assert accelerator.optimizer_step_was_skipped
    assert scheduler.last_epoch == 0
    torch.testing.assert_close(model.weight.detach(), before)
    optimizer.zero_grad()
    accelerator.backward(model(X[0]).sum())
    optimizer.step()
    scheduler.step()
    assert not accelerator.optimizer_step_was_skipped
    assert scheduler.last_epoch == 1


def test_a_plain_backward_under_a_scaler_is_refused_at_the_step() -> None:
    accelerator = Accelerator(mixed_precision=Scaling())
    model = line()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    model(X[0]).pow(2).mean().backward()
    with pytest.raises(RuntimeError, match=r"no accelerator.backward\(loss\) ran since its last step"):
        optimizer.step()


def test_unscaling_an_optimizer_that_is_not_prepared_is_refused() -> None:
    accelerator = Accelerator()
    with pytest.raises(ValueError, match=r"given a SGD that is not prepared: use prepare\(\)"):
        accelerator.unscale_gradients(torch.optim.SGD(line().parameters(), lr=0.1))


class LeftToTheDevice(Precision):
    """Steps are left out by kernels: where `overflow` says so, of which the host knows nothing yet."""

    def __init__(self) -> None:
        super().__init__()
        self.overflow = torch.tensor(False)

    @hookimpl
    def optimizer_step(self, step: Any) -> Any:
        step()
        return SkippedIf(self.overflow)


def test_a_step_that_the_device_left_out_is_told_to_whoever_asks() -> None:
    precision = LeftToTheDevice()
    accelerator, model = Accelerator(mixed_precision=precision), line()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = LambdaLR(optimizer, lambda step: 0.5**step)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    seen = []
    for overflow in (True, False, True):
        precision.overflow = torch.tensor(overflow)
        accelerator.backward(model(X).pow(2).mean())
        assert optimizer.step() is None
        assert optimizer.step_was_skipped is precision.overflow
        scheduler.step()
        optimizer.zero_grad()
        seen.append((accelerator.optimizer_step_was_skipped, scheduler.get_last_lr()))
    assert seen == [(True, [0.1]), (False, [0.05]), (True, [0.05])]


def test_an_optimizer_that_was_not_prepared_warns_once_inside_of_a_window() -> None:
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model = accelerator.prepare(line())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    told = r"SGD trains a prepared model, but was not prepared: it steps inside windows.* Pass it to prepare\(\)\."
    with accelerator.accumulate(model):
        accelerator.backward(model(X[0]).sum())
        with pytest.warns(UserWarning, match=told) as caught:
            optimizer.step()
    with accelerator.accumulate(model):
        accelerator.backward(model(X[0]).sum())
        optimizer.step()
    with accelerator.accumulate(model):
        optimizer.step()  # once told is enough
    assert [each.filename for each in caught] == [__file__]


def test_an_optimizer_that_was_not_prepared_warns_on_scaled_gradients_through_a_scheduler_too() -> None:
    accelerator = Accelerator(mixed_precision=Scaling())
    model = accelerator.prepare(line())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)  # wraps the step
    model(X[0]).sum().backward()
    optimizer.step()  # a loop of its own, of which nothing is scaled
    accelerator.backward(model(X[0]).sum())
    with pytest.warns(UserWarning, match=r"SGD trains a prepared model, .* on scaled gradients") as caught:
        optimizer.step()
    assert [each.filename for each in caught] == [__file__]
    scheduler.step()


class Around(torch.optim.SGD):
    """Steps another optimizer of the same parameters, as wrappers that average weights do."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups[0]["params"], lr=0.0)
        self.inner = inner

    def step(self, closure: Any = None) -> Any:
        return self.inner.step()


@pytest.mark.parametrize("prepares_inner", [True, False])
def test_what_steps_inside_of_a_prepared_optimizer_or_around_one_is_as_prepared(prepares_inner: bool) -> None:
    accelerator = Accelerator(mixed_precision=Scaling(), gradient_accumulation_steps=2)
    model = accelerator.prepare(line())
    around = Around(torch.optim.SGD(model.parameters(), lr=0.1))
    accelerator.prepare(around.inner if prepares_inner else around)
    for _ in range(4):
        with accelerator.accumulate(model):
            accelerator.backward(model(X[0]).sum())
            around.step()


def test_optimizers_of_nothing_that_is_prepared_step_in_silence() -> None:
    accelerator = Accelerator(mixed_precision=Scaling(), gradient_accumulation_steps=2)
    model = line()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    other, averaged = line(), torch.optim.swa_utils.AveragedModel(model)
    evaluated = accelerator.prepare_model(line(), evaluation_mode=True)
    others = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (other, averaged, evaluated)]
    for _ in range(2):
        with accelerator.accumulate(model):
            accelerator.backward(model(X[0]).sum())
            other(X[0]).sum().backward()
            for each in (*others, optimizer):
                each.step()


def test_where_every_batch_is_a_step_of_whole_gradients_an_optimizer_may_be_left_out() -> None:
    accelerator = Accelerator()
    model = accelerator.prepare(line())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accelerator.backward(model(X[0]).sum())
    optimizer.step()
    accelerator.free_memory()
