"""The budget of waits: how often the host may wait for a device in what a training loop calls.

An asynchronous device stands idle after each wait until the host has queued work again. The device here may be synchronous:
what is counted are the operators and copies that would wait on any.
"""

from __future__ import annotations

import pytest
import torch
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
    "detect_nonfinite": 1,
}
"""The most waits of a call in a steady loop, on any rank of one or two."""


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
    careful = Loop(detect_nonfinite=True)
    yield "detect_nonfinite", careful.step


def waits():
    """What each call has waited for, the third time."""
    found = {}
    for name, call in calls():
        for _ in range(2):
            call()
        with count_waits(getattr(torch.toy, "waits", None)) as found[name]:
            call()
    return found


@pytest.mark.parametrize("ranks", [1, 2])
def test_nothing_waits_for_the_device_more_often_than_its_budget_allows(ranks):
    for found in run_ranks(waits, ranks):
        assert found.keys() == BUDGET.keys()
        over = {name: names for name, names in found.items() if len(names) > BUDGET[name]}
        assert not over
