"""`AcceleratedOptimizer` and `AcceleratedScheduler`: what prepared objects are instances of, and what calls of them gate."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR

from accel_core import Accelerator
from accel_core.facade.accelerated import AcceleratedOptimizer, AcceleratedScheduler


def pieces() -> tuple[nn.Linear, torch.optim.Optimizer, StepLR]:
    torch.manual_seed(0)
    model = nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    return model, optimizer, StepLR(optimizer, step_size=1, gamma=0.5)


def test_what_prepare_returned_is_an_instance_until_memory_is_freed() -> None:
    accelerator = Accelerator()
    model, optimizer, scheduler = pieces()
    assert not isinstance(optimizer, AcceleratedOptimizer)
    assert not isinstance(scheduler, AcceleratedScheduler)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    assert isinstance(optimizer, AcceleratedOptimizer)
    assert isinstance(scheduler, AcceleratedScheduler)
    assert isinstance(optimizer, torch.optim.SGD)
    assert isinstance(scheduler, StepLR)
    assert not isinstance(optimizer, AcceleratedScheduler)
    assert not isinstance(model, AcceleratedOptimizer)
    accelerator.free_memory()
    assert not isinstance(optimizer, AcceleratedOptimizer)
    assert not isinstance(scheduler, AcceleratedScheduler)


def test_a_scheduler_that_is_prepared_without_its_optimizer_is_an_instance() -> None:
    accelerator = Accelerator()
    assert isinstance(accelerator.prepare(pieces()[2]), AcceleratedScheduler)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
def test_copies_are_not_prepared(duplicate: Callable[[Any], Any]) -> None:
    accelerator = Accelerator()
    _, optimizer, scheduler = pieces()
    optimizer, scheduler = duplicate(accelerator.prepare(optimizer, scheduler))
    assert not isinstance(optimizer, AcceleratedOptimizer)
    assert not isinstance(scheduler, AcceleratedScheduler)


def test_one_optimizer_is_made_an_instance_without_an_accelerator() -> None:
    model, plain, _ = pieces()
    optimizer = AcceleratedOptimizer(plain)
    assert optimizer is plain
    assert isinstance(optimizer, AcceleratedOptimizer)
    before = model.weight.detach().clone()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    torch.testing.assert_close(model.weight.detach(), before - 1.0)
    assert model.weight.grad is None
    assert optimizer.step_was_skipped is False


def test_a_scaler_steps_and_tells_of_an_overflow() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    model, optimizer, scheduler = pieces()
    optimizer = AcceleratedOptimizer(optimizer, scaler=scaler)
    scheduler = AcceleratedScheduler(scheduler, optimizer)
    before = model.weight.detach().clone()
    scaler.scale(model(torch.ones(1, 2)).sum() * float("inf")).backward()
    optimizer.step()
    scheduler.step()
    assert (optimizer.step_was_skipped, scheduler.last_epoch, scaler.get_scale()) == (True, 0, 512.0)
    optimizer.zero_grad()
    scaler.scale(model(torch.ones(1, 2)).sum()).backward()
    optimizer.step()
    scheduler.step()
    assert (optimizer.step_was_skipped, scheduler.last_epoch) == (False, 1)
    torch.testing.assert_close(model.weight.detach(), before - 1.0)


def test_a_closure_and_a_scaler_are_refused() -> None:
    optimizer = AcceleratedOptimizer(pieces()[1], scaler=torch.amp.GradScaler("cpu"))
    with pytest.raises(
        RuntimeError, match=r"step\(\) of a SGD with a loss scaler was given arguments.*without arguments"
    ):
        optimizer.step(lambda: 1.0)


def test_a_scheduler_waits_for_all_its_optimizers() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    model, other, _ = pieces()
    _, own, scheduler = pieces()
    other = AcceleratedOptimizer(other, scaler=scaler)
    scheduler = AcceleratedScheduler(scheduler, [AcceleratedOptimizer(own), other])
    scaler.scale(model(torch.ones(1, 2)).sum() * float("inf")).backward()
    other.step()
    own.step()
    scheduler.step()
    assert scheduler.last_epoch == 0


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")  # torch's own remark on what this test does
def test_a_scheduler_may_be_left_alone() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    model, optimizer, scheduler = pieces()
    optimizer = AcceleratedOptimizer(optimizer, scaler=scaler)
    scheduler = AcceleratedScheduler(scheduler, optimizer, step_with_optimizer=False)
    scaler.scale(model(torch.ones(1, 2)).sum() * float("inf")).backward()
    optimizer.step()
    scheduler.step()
    assert (optimizer.step_was_skipped, scheduler.last_epoch) == (True, 1)


@pytest.mark.parametrize("split_batches", [True, False])
def test_one_step_is_one_step_whoever_splits_the_batches(split_batches: bool) -> None:
    _, optimizer, scheduler = pieces()
    optimizer.step()
    AcceleratedScheduler(scheduler, optimizer, split_batches=split_batches).step()
    assert scheduler.last_epoch == 1


def test_an_accelerator_takes_over_what_was_made_by_hand() -> None:
    model, optimizer, scheduler = pieces()
    AcceleratedOptimizer(optimizer)
    AcceleratedScheduler(scheduler, optimizer)
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    for _ in range(2):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(1, 2)).sum())
            optimizer.step()
            scheduler.step()
    assert scheduler.last_epoch == 1


def test_making_it_by_hand_again_counts_anew() -> None:
    _, optimizer, _ = pieces()
    AcceleratedOptimizer(optimizer, scaler=torch.amp.GradScaler("cpu"))
    assert AcceleratedOptimizer(optimizer) is optimizer
    assert isinstance(Accelerator().prepare(optimizer), AcceleratedOptimizer)


def test_the_state_is_moved_to_the_parameters_unless_told_otherwise() -> None:
    model, optimizer, _ = pieces()
    for placed, device in ((False, "meta"), (True, "cpu")):
        optimizer.state[model.weight] = {"momentum_buffer": torch.empty(1, 2, device=device)}
        AcceleratedOptimizer(optimizer, device_placement=placed)
        assert optimizer.state[model.weight]["momentum_buffer"].device.type == device


def test_what_an_accelerator_would_drop_is_refused() -> None:
    """Law 8."""
    accelerator = Accelerator()
    _, optimizer, scheduler = pieces()
    AcceleratedOptimizer(optimizer, scaler=torch.amp.GradScaler("cpu"))
    with pytest.raises(
        ValueError, match=r"This SGD was given scaler=GradScaler\(...\) by Acc.*choose Accelerator\(mixed_p"
    ):
        accelerator.prepare(optimizer)
    AcceleratedScheduler(scheduler, optimizer, step_with_optimizer=False)
    with pytest.raises(
        ValueError, match=r"StepLR was made by AcceleratedScheduler\(\) with step_with_optimizer=False and 1"
    ):
        accelerator.prepare(scheduler)


def test_what_an_accelerator_has_prepared_is_refused() -> None:
    accelerator = Accelerator()
    _, optimizer, scheduler = pieces()
    accelerator.prepare(optimizer, scheduler)
    with pytest.raises(ValueError, match=r"This SGD is prepared by an Accelerator\. Call free_memory\(\) of that one"):
        AcceleratedOptimizer(optimizer)
    with pytest.raises(ValueError, match=r"This StepLR is prepared by an Accelerator.*Call free_memory\(\) of that"):
        AcceleratedScheduler(scheduler, optimizer)


def test_an_optimizer_of_an_accelerator_that_is_gone_may_be_made_by_hand() -> None:
    _, optimizer, _ = pieces()
    Accelerator(gradient_accumulation_steps=4).prepare(optimizer)
    gc.collect()
    assert isinstance(AcceleratedOptimizer(optimizer), AcceleratedOptimizer)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda o, s: type("Mine", (AcceleratedOptimizer,), {})(o),
            TypeError,
            r"Mine\(\) is a subclass of AcceleratedOptimizer, but what is prepared keeps its own class",
        ),
        (
            lambda o, s: type("Mine", (AcceleratedScheduler,), {})(s, o),
            TypeError,
            r"Mine\(\) is a subclass of AcceleratedScheduler, but what is prepared keeps its own class",
        ),
        (
            lambda o, s: Accelerator(step_scheduler_with_optimizer="no"),
            TypeError,
            "step_scheduler_with_optimizer='no' is a str: expected True or False",
        ),
    ],
)
def test_arguments_of_another_kind_are_refused(
    call: Callable[[Any, Any], object], error: type[Exception], message: str
) -> None:
    _, optimizer, scheduler = pieces()
    with pytest.raises(error, match=message):
        call(optimizer, scheduler)


def test_the_classes_may_be_subclassed_and_no_prepared_object_is_an_instance_of_the_subclass() -> None:
    _, optimizer, scheduler = pieces()
    optimizer, scheduler = Accelerator().prepare(optimizer, scheduler)
    for prepared, kind in ((optimizer, AcceleratedOptimizer), (scheduler, AcceleratedScheduler)):
        assert isinstance(prepared, kind)
        assert not isinstance(prepared, type("Theirs", (kind,), {}))
