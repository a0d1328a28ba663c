"""The budget of waits: how often the host may wait for a device in what a training loop calls.

An asynchronous device stands idle after each wait until the host has queued work again. The device here may be synchronous:
what is counted are the operators and copies that would wait on any.
"""

from __future__ import annotations

import re
import threading
from collections import Counter
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset

import accel_toydevice  # noqa: F401  (gives torch the device, here and on every rank that imports this file)
from accel_core import Accelerator, Tracker, broadcast, broadcast_object_list, gather_object
from accel_data import DataLoaderConfiguration
from accel_testing import run_ranks
from accel_testing.waits import count_waits

BUDGET = {
    "plain step": 0,
    "clip_grad_norm_": 0,
    "accumulate": 0,
    "log": 0,
    "loader, non_blocking": 0,
    "loader, pinned": 0,
    "loader": 8,
    "forward_backward, int weights": 0,
    "forward_backward, tensor weights": 0,
    "gather": 0,
    "gather_for_metrics": 0,
    "reduce": 0,
    "reduce, large": 0,
    "broadcast": 0,
    "pad_across_processes": 0,
    "check_trigger": 0,
    "should_stop": 0,
    "gather_object": 0,
    "broadcast_object_list": 0,
    "wait_for_everyone": 0,
    "fp16": 1,
    "fp16, fused": 0,
    "fp16, fused, clip_grad_norm_": 0,
    "fp16, fused, scheduler": 1,
    "detect_nonfinite": 1,
    "FSDP, plain step": 0,
    "FSDP, clip_grad_norm_": 0,
    "save_state": 1,
    "save_state, eager": 1,
    "save_state, lazy": 0,
}
"""The most waits of a call in a steady loop, on any rank of one or two."""

BATCHES = 4
"""Of the loaders, whose budget is that of an epoch."""

PAGE = Path(__file__).parents[3] / "docs" / "performance" / "over-time.md"
ROWS = {
    "plain step, `clip_grad_norm_`, `accumulate`": ["plain step", "clip_grad_norm_", "accumulate"],
    "the same under FSDP": ["FSDP, plain step", "FSDP, clip_grad_norm_"],
    "`log` of a device's scalar": ["log"],
    "loader with `non_blocking=True`": ["loader, non_blocking"],
    "loader out of pinned memory, by default, per batch of two": ["loader, pinned"],
    "loader out of other memory, by default, per batch of two": ["loader"],
    "`forward_backward`, 2 micro-batches, weights as numbers": ["forward_backward, int weights"],
    "`forward_backward`, 2 micro-batches, weights as tensors": ["forward_backward, tensor weights"],
    "`gather`, `gather_for_metrics`, `reduce`, `broadcast`": [
        "gather",
        "gather_for_metrics",
        "reduce",
        "reduce, large",
        "broadcast",
    ],
    "`pad_across_processes`": ["pad_across_processes"],
    "`check_trigger`, `should_stop`": ["check_trigger", "should_stop"],
    "`gather_object`, `broadcast_object_list`": ["gather_object", "broadcast_object_list"],
    "`wait_for_everyone`": ["wait_for_everyone"],
    "fp16, fused optimizer, clipped or not": ["fp16, fused", "fp16, fused, clip_grad_norm_"],
    "fp16, fused optimizer, with a prepared LR scheduler": ["fp16, fused, scheduler"],
    "fp16, another optimizer": ["fp16"],
    "`detect_nonfinite=True`": ["detect_nonfinite"],
    '`save_state`, at once or `asynchronous="eager"`': ["save_state", "save_state, eager"],
    '`save_state(asynchronous="lazy")`': ["save_state, lazy"],
}
"""The rows of the page, and what they tell of."""


class Recorder(Tracker):
    name = "recorder"

    def start(self, run):
        pass

    def log(self, values, step):
        pass


class Loop:
    """A model of two layers, its optimizer, and a batch on the device."""

    def __init__(self, fused=False, **options):
        self.accelerator = Accelerator(**options)
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
        model.to(self.accelerator.device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        self.x = torch.arange(12.0, device=self.accelerator.device).view(4, 3).sin()

    def step(self, clip=False, log=False):
        with self.accelerator.accumulate(self.model):
            loss = self.model(self.x).square().mean()
            self.accelerator.backward(loss)
            if clip:
                self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
        if log:
            self.accelerator.log({"loss": loss.detach()})

    def window(self, loss_fn):
        self.accelerator.forward_backward(self.model, [self.x, self.x], loss_fn)
        self.optimizer.step()
        self.optimizer.zero_grad()


def by_numbers(output, batch):
    return output.square().sum(), len(batch)


def by_tensors(output, batch):
    return output.square().sum(), (batch > 0).sum()


def read(pinned, **options):
    """A function that reads an epoch; its batches of two tensors say that they are pinned, or not."""
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(**options))
    data = TensorDataset(torch.ones(8, 3), torch.ones(8))
    loader = accelerator.prepare(DataLoader(data, batch_size=2))

    def epoch():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.Tensor, "is_pinned", lambda tensor: pinned and tensor.device.type == "cpu")
            assert [x.device.type for x, _ in loader] == ["toy"] * len(loader)

    return epoch


def calls():
    """Every call of the table, ready to be made again and again."""
    plain = Loop()
    accelerator, x = plain.accelerator, plain.x
    large = torch.ones(1 << 19, device=accelerator.device)
    yield "plain step", plain.step
    yield "clip_grad_norm_", lambda: plain.step(clip=True)
    accumulating = Loop(gradient_accumulation_steps=2)
    yield "accumulate", lambda: [accumulating.step() for _ in range(2)]
    logging = Loop(log_with=Recorder())
    logging.accelerator.init_trackers("toys")
    yield "log", lambda: logging.step(log=True)
    logging.accelerator.free_memory()
    yield "loader, non_blocking", read(pinned=False, non_blocking=True)
    yield "loader, pinned", read(pinned=True)
    yield "loader", read(pinned=False)  # four batches of two tensors, or two
    windows = Loop()
    yield "forward_backward, int weights", lambda: windows.window(by_numbers)
    yield "forward_backward, tensor weights", lambda: windows.window(by_tensors)
    yield "gather", lambda: accelerator.gather({"x": x, "first": x[0, 0]})
    yield "gather_for_metrics", lambda: accelerator.gather_for_metrics((x, x.sum(1)))
    yield "reduce", lambda: accelerator.reduce(x, "mean")
    yield "reduce, large", lambda: accelerator.reduce(large, "max")
    yield "broadcast", lambda: broadcast(x)
    yield "pad_across_processes", lambda: accelerator.pad_across_processes(x)
    yield "check_trigger", accelerator.check_trigger
    accelerator.stop_on_signal()
    yield "should_stop", accelerator.should_stop
    yield "gather_object", lambda: gather_object([accelerator.process_index])
    yield "broadcast_object_list", lambda: broadcast_object_list([accelerator.process_index])
    yield "wait_for_everyone", accelerator.wait_for_everyone
    scaled = Loop(mixed_precision="fp16")
    yield "fp16", scaled.step
    fused = Loop(mixed_precision="fp16", fused=True)
    yield "fp16, fused", fused.step
    yield "fp16, fused, clip_grad_norm_", lambda: fused.step(clip=True)
    scheduler = fused.accelerator.prepare(torch.optim.lr_scheduler.StepLR(fused.optimizer, 5))
    yield "fp16, fused, scheduler", lambda: (fused.step(), scheduler.step())
    careful = Loop(detect_nonfinite=True)
    yield "detect_nonfinite", careful.step
    sharded = Loop(strategy="fsdp")
    yield "FSDP, plain step", sharded.step
    yield "FSDP, clip_grad_norm_", lambda: sharded.step(clip=True)


def saves(folder):
    """The waits of the thread that trains in a save of each kind, the third time: another one waits for the copies."""
    loop, found = Loop(), {}
    for name, mode in (("save_state", False), ("save_state, eager", "eager"), ("save_state, lazy", "lazy")):
        for number in range(3):
            loop.step()
            torch.toy.reset_waits()
            loop.accelerator.save_state(f"{folder}/{mode}-{number}", asynchronous=mode)
            found[name] = [*Counter(torch.toy.waits(threading.get_native_id())).elements()]
            loop.accelerator.wait_for_checkpoint()
    return found


def waits():
    """What each call has waited for, the third time."""
    found = {}
    for name, call in calls():
        for _ in range(2):
            call()
        with count_waits(getattr(torch.toy, "waits", None)) as found[name]:
            call()
    return found


def budget_of(name):
    """That of any device, but for copies to the host, which wait where there is no pinned memory."""
    try:
        torch.empty(1).pin_memory()
    except (NotImplementedError, RuntimeError):
        return 1 if name == "log" else BUDGET[name]
    return BUDGET[name]


@pytest.mark.parametrize("ranks", [1, 2])
def test_nothing_waits_for_the_device_more_often_than_its_budget_allows(ranks, tmp_path):
    for calls, saved in zip(run_ranks(waits, ranks), run_ranks(saves, ranks, tmp_path), strict=True):
        found = calls | saved
        assert found.keys() == BUDGET.keys()
        over = {name: names for name, names in found.items() if len(names) > budget_of(name)}
        assert not over


def test_the_page_has_the_budget():
    cells = re.findall(r"^\| (.+?) +\| .* \| (\d+) +\|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert dict(cells) == {
        row: str(max(BUDGET[name] // (BATCHES if name.startswith("loader") else 1) for name in names))
        for row, names in ROWS.items()
    }
    assert sorted(name for names in ROWS.values() for name in names) == sorted(BUDGET)


class WithoutFloat64(TorchDispatchMode):
    """As devices that lack it: MPS refuses to make such a tensor, others to compute with it."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor) and made.device.type == "toy" and made.dtype is torch.float64:
            raise TypeError("This device has no float64.")
        return made


def window_without_float64():
    """The mean and the gradients of a window whose ranks have 3 and 4 rows."""
    with WithoutFloat64():
        loop = Loop()
        x = loop.x[: 2 + loop.accelerator.process_index]
        loss = loop.accelerator.forward_backward(loop.model, [x, x[:1]], by_numbers)
    return loss.item(), [parameter.grad.tolist() for parameter in loop.model.parameters()]


def on_the_host(ranks):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
    x = torch.arange(12.0).view(4, 3).sin()
    loss = model(torch.cat([x[rows] for rank in range(ranks) for rows in (slice(2 + rank), slice(1))])).square().mean()
    loss.backward()
    return loss.item(), [parameter.grad.tolist() for parameter in model.parameters()]


@pytest.mark.parametrize("ranks", [1, 2])
def test_windows_are_weighed_exactly_on_devices_without_float64(ranks):
    loss, gradients = on_the_host(ranks)
    for found, found_gradients in run_ranks(window_without_float64, ranks):
        assert found == pytest.approx(loss, rel=1e-6)
        for gradient, expected in zip(found_gradients, gradients, strict=True):
            torch.testing.assert_close(torch.tensor(gradient), torch.tensor(expected))


def held():
    """A block in which the device begins nothing, so that whoever waits for it hangs; if it has a queue."""
    return getattr(torch.toy, "held", nullcontext)()


def exchanged_while_it_stands_still():
    """What collectives on two streams give that are called while the device stands still."""
    accelerator = Accelerator()
    rank = accelerator.process_index
    x = torch.full((2,), rank + 1.0, device=accelerator.device)
    for _ in range(2):
        accelerator.gather(x)  # makes communicators
    other = torch.Stream(accelerator.device)
    torch.accelerator.synchronize()
    with held():
        getattr(torch.toy, "_sleep", lambda seconds: None)(0.5)  # what the other stream has queued goes first
        results = [accelerator.gather(x)]
        with other:
            results.append(accelerator.gather(x * 10))
        results += [accelerator.reduce(x, "max"), accelerator.gather((x[:1], x * 100))[1]]
        told = accelerator.check_trigger()
    torch.accelerator.synchronize()
    return [result.tolist() for result in results], told


def test_collectives_are_queued_while_the_device_stands_still_and_do_not_mix_streams():
    expected = [[1.0, 1.0, 2.0, 2.0], [10.0, 10.0, 20.0, 20.0], [2.0, 2.0], [100.0, 100.0, 200.0, 200.0]]
    assert run_ranks(exchanged_while_it_stands_still, 2) == [(expected, False)] * 2


def test_a_loader_that_does_not_pin_is_hinted_at_once():
    hints = []
    for pins in (False, True):
        accelerator = Accelerator()
        accelerator.prepare(*[DataLoader(range(4), pin_memory=pins) for _ in range(2)])
        hints.append([detail.text for detail in accelerator.explain().details if detail.about == "hint"])
    assert ["pin_memory=True" in text for text in hints[0]] == [True]
    assert not any("pin_memory" in text for text in hints[1])
