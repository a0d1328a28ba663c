"""Whole loops with prepared loaders, in one process and on ranks: accumulation, evaluation, and what comes between."""

from __future__ import annotations

import gc
import itertools
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from accel_core import Accelerator, set_seed
from accel_testing import run_ranks


class Numbers(TensorDataset):
    """Sample i is the row (i, 1)."""

    def __init__(self, count: int) -> None:
        super().__init__(torch.stack([torch.arange(count).float(), torch.ones(count)], 1))


class Lengthless:
    """A batch sampler of the user's own that does not say how long it is."""

    def __init__(self, count: int, batch_size: int) -> None:
        self.count, self.batch_size = count, batch_size

    def __iter__(self) -> Iterator[list[int]]:
        for start in range(0, self.count, self.batch_size):
            yield list(range(start, min(start + self.batch_size, self.count)))


class Stream(IterableDataset[torch.Tensor]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.stack([torch.arange(self.count).float(), torch.ones(self.count)], 1))


def line() -> nn.Linear:
    model = nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[0.01, -0.02]]))
    return model


def trace(accelerator: Accelerator, batches: Any, model: nn.Module, optimizer: Any, between: Any = None) -> list[float]:
    """Trains on `batches`; after each update the sum of the weights."""
    found = []
    for index, batch in enumerate(batches):
        x = batch[0] if isinstance(batch, list) else batch
        with accelerator.accumulate(model):
            accelerator.backward(model(x).pow(2).mean())
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            found.append(model.weight.sum().item() if hasattr(model, "weight") else model.module.weight.sum().item())
        if between is not None:
            between(index)
    return found


def reference(batches: int, batch_size: int, accumulation: int) -> list[float]:
    """The same by hand: the mean over the micro-batches that are in each window."""
    model, found = line(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    samples = Numbers(batches * batch_size).tensors[0].split(batch_size)
    for start in range(0, batches, accumulation):
        window = samples[start : start + accumulation]
        optimizer.zero_grad()
        sum(model(x).pow(2).mean() / len(window) for x in window).backward()  # type: ignore[union-attr]
        optimizer.step()
        found.append(model.weight.sum().item())
    return found


def prepared(accelerator: Accelerator, loader: DataLoader[Any]) -> tuple[Any, Any, Any]:
    model = line()
    result: tuple[Any, Any, Any] = accelerator.prepare(loader, model, torch.optim.SGD(model.parameters(), lr=1e-3))
    return result


LOADERS = {
    "map-style": lambda: DataLoader(Numbers(20), batch_size=2),
    "with workers": lambda: DataLoader(Numbers(20), batch_size=2, num_workers=2),
    "batch sampler without length": lambda: DataLoader(Numbers(20), batch_sampler=Lengthless(20, 2)),  # type: ignore[arg-type]
    "iterable": lambda: DataLoader(Stream(20), batch_size=2),
}


@pytest.mark.parametrize("kind", LOADERS)
def test_ten_batches_in_windows_of_four_are_three_updates_the_last_over_two(kind: str) -> None:
    """Loaders without a length look ahead one window."""
    accelerator = Accelerator(gradient_accumulation_steps=4)
    loader, model, optimizer = prepared(accelerator, LOADERS[kind]())
    assert trace(accelerator, loader, model, optimizer) == pytest.approx(reference(10, 2, 4), rel=1e-5)


def evaluation_kinds(accelerator: Accelerator, model: nn.Module) -> dict[str, Any]:
    evaluation = accelerator.prepare(DataLoader(Numbers(3), batch_size=1))
    kept = []

    def whole(_: int) -> None:
        for (x,) in evaluation:
            model(x)

    def broken_out(_: int) -> None:
        for (_x,) in evaluation:
            break

    def broken_out_on_the_last(_: int) -> None:
        for index, _x in enumerate(evaluation):
            if index == 2:
                break

    def raising(_: int) -> None:
        with pytest.raises(ZeroDivisionError):
            for index, _x in enumerate(evaluation):
                1 // (1 - index)

    def kept_alive(_: int) -> None:
        iterator = iter(evaluation)
        kept.append(iterator)
        for _x in itertools.islice(iterator, 3):
            pass

    def nested(_: int) -> None:
        for _x in evaluation:
            for _y in evaluation:
                pass

    return {
        function.__name__: function
        for function in (whole, broken_out, broken_out_on_the_last, raising, kept_alive, nested)
    }


@pytest.mark.parametrize("kind", ["whole", "broken_out", "broken_out_on_the_last", "raising", "kept_alive", "nested"])
def test_an_evaluation_loop_inside_training_changes_nothing(kind: str) -> None:
    accelerator = Accelerator(gradient_accumulation_steps=4)
    loader, model, optimizer = prepared(accelerator, DataLoader(Numbers(20), batch_size=2))
    between = evaluation_kinds(accelerator, model)[kind]
    assert trace(accelerator, loader, model, optimizer, between) == pytest.approx(reference(10, 2, 4), rel=1e-5)


def test_breaking_on_the_last_batch_does_not_switch_accumulation_off() -> None:
    """Measured in the peer."""
    accelerator = Accelerator(gradient_accumulation_steps=4)
    loader, model, _ = prepared(accelerator, DataLoader(Numbers(8), batch_size=2))
    for _ in zip(range(4), loader, strict=False):
        pass
    closes = []
    for x in Numbers(6).tensors[0].split(2):  # a loop over something that is not prepared
        with accelerator.accumulate(model):
            accelerator.backward(model(x).mean())
        closes.append(accelerator.sync_gradients)
    assert closes == [False, False, False]


def test_loops_driven_by_hand_and_zipped_loops_close_their_last_window() -> None:
    accelerator = Accelerator(gradient_accumulation_steps=4)
    loader, model, optimizer = prepared(accelerator, DataLoader(Numbers(20), batch_size=2))
    other = accelerator.prepare(DataLoader(Numbers(60), batch_size=2))
    iterator = iter(loader)
    by_hand = (next(iterator) for _ in range(10))
    assert trace(accelerator, by_hand, model, optimizer) == pytest.approx(reference(10, 2, 4), rel=1e-5)
    loader, model, optimizer = prepared(accelerator, DataLoader(Numbers(20), batch_size=2))
    zipped = (batch for batch, _ in zip(loader, other, strict=False))
    assert trace(accelerator, zipped, model, optimizer) == pytest.approx(reference(10, 2, 4), rel=1e-5)


def windows_on_ranks() -> list[float]:
    accelerator = Accelerator(gradient_accumulation_steps=4)
    loader, model, optimizer = prepared(accelerator, DataLoader(Numbers(20), batch_size=2 // accelerator.num_processes))
    return trace(accelerator, loader, model, optimizer)


def test_windows_are_the_same_on_two_ranks() -> None:
    for found in run_ranks(windows_on_ranks, 2):
        assert found == pytest.approx(reference(10, 2, 4), rel=1e-5)


def rates(accumulation: int, per_process: bool = False) -> list[float]:
    accelerator = Accelerator(gradient_accumulation_steps=accumulation, step_scheduler_per_process=per_process)
    model = line()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = LambdaLR(optimizer, lambda step: 0.5**step)
    loader = DataLoader(Numbers(8 * accumulation * accelerator.num_processes), batch_size=2)
    loader, model, optimizer, scheduler = accelerator.prepare(loader, model, optimizer, scheduler)
    found = []
    for (x,) in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(x).mean() * 0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            found.append(scheduler.get_last_lr()[0])
    return found


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_one_scheduler_step_is_one_step_on_any_number_of_processes(world: int, accumulation: int) -> None:
    for found in [rates(accumulation)] if world == 1 else run_ranks(rates, world, accumulation):
        assert found == [0.5, 0.25, 0.125, 0.0625]


def test_the_peers_rule_is_an_explicit_option() -> None:
    for found in run_ranks(rates, 2, 1, per_process=True):
        assert found == [0.5**2, 0.5**4, 0.5**6, 0.5**8]


def metrics() -> dict[str, list[float]]:
    accelerator = Accelerator()
    loader = accelerator.prepare(DataLoader(Numbers(9), batch_size=4 // accelerator.num_processes))
    found: dict[str, list[float]] = {"loop": []}
    for (x,) in loader:
        samples, ones = accelerator.gather_for_metrics((x[:, 0], {"ones": x[:, 1]}))
        assert len(samples) == len(ones["ones"])
        found["loop"] += samples.tolist()
    (batch,) = next(iter(loader))
    found["next(iter())"] = accelerator.gather_for_metrics(batch)[:, 0].tolist()
    found["objects"] = []
    for (x,) in loader:
        names = [f"{value:g}" for value in x[:, 0].tolist()]
        found["objects"] += [float(name) for name in accelerator.gather_for_metrics(names)]
    outer = iter(loader)
    next(outer)
    for _ in accelerator.prepare(DataLoader(Numbers(2), batch_size=2)):
        pass
    found["after a nested loop"] = accelerator.gather_for_metrics(batch)[:, 0].tolist()
    return found


def test_metrics_count_every_sample_once_wherever_they_are_gathered() -> None:
    numbers = [float(value) for value in range(9)]
    for found in [metrics(), *run_ranks(metrics, 2)]:
        assert found["loop"] == numbers
        assert found["objects"] == numbers
        assert found["next(iter())"] == numbers[:4]
        assert found["after a nested loop"] == numbers[:4]


def shuffled() -> list[list[float]]:
    set_seed(7)
    accelerator = Accelerator()
    loader = accelerator.prepare(DataLoader(Numbers(12), batch_size=4 // accelerator.num_processes, shuffle=True))
    return [[v for (x,) in loader for v in accelerator.gather_for_metrics(x[:, 0]).tolist()] for _ in range(2)]


def test_the_order_is_the_same_on_one_process_and_on_two() -> None:
    """A function of seed and epoch."""
    alone = shuffled()
    assert alone[0] != alone[1]
    assert all(sorted(epoch) == [float(v) for v in range(12)] for epoch in alone)
    for found in run_ranks(shuffled, 2):
        assert found == alone


class Bucketed:
    """A sampler of the user's own that draws from a global stream."""

    def __init__(self, count: int, draw: str) -> None:
        self.count, self.draw = count, draw

    def __iter__(self) -> Iterator[int]:
        order = list(range(self.count))
        if self.draw == "python":
            random.shuffle(order)
        else:
            order = torch.randperm(self.count).tolist()
        return iter(order)

    def __len__(self) -> int:
        return self.count


def own_sampler(draw: str) -> dict[str, Any]:
    accelerator = Accelerator()
    random.seed(accelerator.process_index)
    torch.manual_seed(accelerator.process_index)
    before = random.getstate(), torch.get_rng_state()
    loader = accelerator.prepare(DataLoader(Numbers(16), batch_size=2, sampler=Bucketed(16, draw)))  # type: ignore[arg-type]
    epochs = [[v for (x,) in loader for v in accelerator.gather_for_metrics(x[:, 0]).tolist()] for _ in range(2)]
    return {"epochs": epochs, "streams untouched": random.getstate() == before[0]}


@pytest.mark.parametrize("draw", ["python", "torch"])
def test_a_sampler_that_draws_from_the_global_streams_loses_nothing(draw: str) -> None:
    """The streams differ between ranks, the order must not."""
    for found in run_ranks(own_sampler, 2, draw):
        first, second = found["epochs"]
        assert sorted(first) == sorted(second) == [float(value) for value in range(16)]
        assert first != second
        assert found["streams untouched"]


def test_fifty_runs_leave_nothing_behind() -> None:
    """Create, train, close; object counts stay flat."""

    def run() -> None:
        accelerator = Accelerator(gradient_accumulation_steps=2)
        loader, model, optimizer = prepared(accelerator, DataLoader(Numbers(8), batch_size=2))
        trace(accelerator, loader, model, optimizer)
        accelerator.end_training()

    for _ in range(3):
        run()
    gc.collect()
    before = len(gc.get_objects())
    for _ in range(50):
        run()
    gc.collect()
    assert len(gc.get_objects()) - before < 50
