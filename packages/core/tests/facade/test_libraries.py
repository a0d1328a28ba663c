"""What libraries that train by themselves ask of an Accelerator: their own count, the weight that they expect, where loaders are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from together import Together
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from accel_core import Accelerator, GradientAccumulationPlugin, Precision, find_executable_batch_size, hookimpl

ON_TWO = Together(2)
X = torch.arange(1.0, 9.0).view(8, 1)


def line() -> nn.Linear:
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    return model


def counted(windows: list[int], steps: int, **options: Any) -> list[float]:
    """The gradient of each window of so many micro-batches, which the caller counts; `zero_grad` stands first."""
    accelerator = Accelerator(gradient_accumulation_steps=steps, **options) if steps else Accelerator(**options)
    model = line()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
    found, rows = [], iter(X.chunk(8))
    for size in windows:
        for number in range(size):
            with accelerator.accumulate(model, closes=number + 1 == size):
                optimizer.zero_grad()
                row = next(rows) + 10 * accelerator.process_index
                accelerator.backward(model(row).sum())
                optimizer.step()
                if accelerator.sync_gradients:
                    found.append(_gradient(model))
    return found


def _gradient(model: nn.Module) -> float:
    return next(iter(model.parameters())).grad.item()


@pytest.mark.parametrize("steps", [1, 2, 4])
def test_a_window_that_the_caller_closes_is_the_mean_over_what_is_in_it(steps: int) -> None:
    assert counted([2, 3, 1], steps) == pytest.approx([1.5, 4.0, 6.0])


@ON_TWO
def counted_by_two() -> list[float]:
    accelerator = Accelerator()
    model = line()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
    found = []
    for number, row in enumerate(X.chunk(4)):
        with accelerator.accumulate(model, closes=number == 3):
            accelerator.backward(model(row[accelerator.process_index :][:1]).sum())
            found.append(_gradient(model))
            optimizer.step()
            optimizer.zero_grad()
    with accelerator.accumulate(model):
        found.append(accelerator.sync_gradients)
        accelerator.backward(model(X[:1]).sum())
        found.append(_gradient(model))
    return found


def test_gradients_travel_in_the_micro_batch_that_the_caller_says() -> None:
    first, second = ON_TWO.run(counted_by_two)
    assert first[:3] != second[:3]
    assert first[3] == second[3] == pytest.approx(4.5)
    assert first[4:] == second[4:] == [True, 1.0]


def over(mean_over: str, steps: int = 4) -> list[float]:
    accelerator = Accelerator(gradient_accumulation_plugin=GradientAccumulationPlugin(steps, mean_over=mean_over))
    model = line()
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.0), DataLoader(X[:6], batch_size=1)
    )
    found = []
    for row in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(row).sum())
            optimizer.step()
            if accelerator.sync_gradients:
                found.append(_gradient(model))
            optimizer.zero_grad()
    return found


def test_a_short_last_window_may_weigh_as_other_libraries_have_it() -> None:
    assert over("window") == [2.5, 5.5]
    assert over("steps") == [2.5, 2.75]
    plugin = GradientAccumulationPlugin(4, mean_over="steps")
    assert counted([2, 3], 0, gradient_accumulation_plugin=plugin) == [0.75, 3.0]
    with pytest.raises(ValueError, match=r"GradientAccumulationPlugin\(mean_over='sum'\): expected 'window'"):
        GradientAccumulationPlugin(mean_over="sum")  # type: ignore[arg-type]


def test_accumulation_steps_may_be_assigned_between_two_windows() -> None:
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model = accelerator.prepare(line())
    closes = []
    for steps in (2, 3, 1):
        accelerator.gradient_accumulation_steps = steps
        for _ in range(steps):
            with accelerator.accumulate(model):
                accelerator.backward(model(X[:1]).sum())
                closes.append(accelerator.sync_gradients)
        assert accelerator.gradient_accumulation_steps == steps
    assert closes == [False, True, False, False, True, True]
    assert _gradient(model) == pytest.approx(3.0)
    with pytest.raises(ValueError, match="expected an integer of at least 1"):
        accelerator.gradient_accumulation_steps = 0
    accelerator.gradient_accumulation_steps = 2
    with accelerator.accumulate(model):
        accelerator.backward(model(X[:1]).sum())
    with pytest.raises(RuntimeError, match=r"gradient_accumulation_steps = 1 was asked for while a window .* is open"):
        accelerator.gradient_accumulation_steps = 1


def test_a_smaller_batch_that_memory_suffices_for_has_its_own_accumulation_steps() -> None:
    accelerator = Accelerator()
    model = accelerator.prepare(line())
    closes = []

    @find_executable_batch_size(starting_batch_size=8, reduce_batch_size_fn=lambda size: size // 2)
    def train(size: int) -> None:
        accelerator.gradient_accumulation_steps = 8 // size
        for batch in X[:1].repeat(8, 1).split(size):
            with accelerator.accumulate(model):
                accelerator.backward(model(batch).mean())
                closes.append(accelerator.sync_gradients)
                if size > 2:
                    raise torch.OutOfMemoryError("out of memory")
        model.zero_grad()

    train()
    assert closes == [True, False, False, False, False, True], "of 8, 4 and 2 samples"


@pytest.mark.parametrize("clears", [False, True])
def test_what_a_window_had_before_an_error_is_dropped_where_the_steps_are_assigned_behind_it(clears: bool) -> None:
    accelerator = Accelerator(gradient_accumulation_steps=4)
    model = line()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    before = model.weight.item()

    def train(*values: float) -> None:
        for value in values:
            with accelerator.accumulate(model):
                accelerator.backward(value * model.weight.sum())
                if value > 200:
                    raise torch.OutOfMemoryError("out of memory")
                optimizer.step()
                optimizer.zero_grad()

    with pytest.raises(torch.OutOfMemoryError):
        train(100.0, 300.0)
    if clears:
        optimizer.zero_grad()
    accelerator.gradient_accumulation_steps = 2
    train(1.0, 1.0)
    assert model.weight.item() == pytest.approx(before - 1.0)


def test_a_window_that_the_caller_holds_open_after_an_error_is_not_given_up() -> None:
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model = accelerator.prepare(line())
    with pytest.raises(torch.OutOfMemoryError), accelerator.accumulate(model):
        raise torch.OutOfMemoryError("out of memory")
    accelerator.sync_gradients = False
    with pytest.raises(RuntimeError, match="while a window of accumulation is open"):
        accelerator.gradient_accumulation_steps = 3


class _Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(X[:1].repeat(11, 1))


@pytest.mark.parametrize("loader", [DataLoader(_Stream()), DataLoader(X[:1].repeat(11, 1))], ids=["stream", "sized"])
def test_windows_that_grow_within_an_epoch_have_their_size_from_then_on(loader: DataLoader[torch.Tensor]) -> None:
    accelerator = Accelerator()
    model, loader = accelerator.prepare(line(), loader)
    windows, size = [], 0
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).sum())
            size += 1
        if accelerator.sync_gradients:
            windows.append((size, _gradient(model)))
            size = 0
            model.zero_grad()
            if len(windows) == 1:
                accelerator.gradient_accumulation_steps = 4
    assert windows == [(1, 1.0), (4, 1.0), (4, 1.0), (2, 1.0)], "each is a mean, the last one too"


def test_the_running_loader_is_the_innermost_with_its_last_batch_and_rows() -> None:
    accelerator = Accelerator()
    train, evaluation = accelerator.prepare(DataLoader(X, batch_size=3), DataLoader(X[:2], batch_size=2))
    assert accelerator.running_loader is None
    seen = []
    for _ in train:
        running = accelerator.running_loader
        seen.append((running.loader is train, running.is_last, running.remaining, running.rows.real))
        for _ in evaluation:
            assert accelerator.running_loader.loader is evaluation
            assert accelerator.running_loader.is_last
        assert accelerator.running_loader.loader is train
    assert seen == [(True, False, 2, 3), (True, False, 1, 3), (True, True, 0, 2)]
    assert accelerator.running_loader is None


class Scaling(Precision):
    @hookimpl
    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        return loss * 2.0

    def state_dict(self) -> dict[str, Any]:
        return {"scale": 2.0}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise NotImplementedError


def test_what_scales_losses_can_be_saved_by_others() -> None:
    assert Accelerator(mixed_precision=Scaling()).scaler.state_dict() == {"scale": 2.0}
    assert Accelerator().scaler is None
