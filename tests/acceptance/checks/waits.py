"""Calls of a training loop that must not make the host wait for its device.

The detector is that of the device: of CUDA, torch's own, which raises at each wait.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from acceptance.registry import ALL, ANY, Run, check, skip
from acceptance.training import Shape, Trainer, loss_of, make_data

from accel_core import Tracker


class Listener(Tracker):
    """It keeps nothing: what is asked is when it is given something."""

    name = "listener"

    def start(self, run: Any) -> None: ...

    def log(self, values: Any, step: int | None) -> None: ...


@contextmanager
def no_waits(run: Run) -> Iterator[None]:
    """A block in which every wait raises, by the detector of the device."""
    module = torch.get_device_module(run.device)
    if not hasattr(module, "set_sync_debug_mode"):
        skip(f"nobody tells when the host waits for {run.device.type}")
    torch.accelerator.synchronize()
    module.set_sync_debug_mode("error")
    try:
        yield
    finally:
        module.set_sync_debug_mode("default")


def watched(run: Run, function: Callable[[], Any], what: str) -> None:
    """Twice as it is, for what is made at a first call, and for DDP's buckets, made anew at the second; then without waits."""
    function()
    function()
    with no_waits(run):
        try:
            function()
        except RuntimeError as error:
            raise AssertionError(f"{what}: {error}") from error


def assert_detects(run: Run) -> None:
    value = torch.ones(2, device=run.device)
    try:
        with no_waits(run):
            value.sum().item()
    except RuntimeError:
        return
    raise AssertionError("the detector sees no wait in item()")


def loop(run: Run, precision: str = "no", **options: Any) -> None:
    """A step as users write it: backward, clipping, step, and what is logged."""
    trainer = Trainer(run, 3, {"mixed_precision": precision, **options}, Shape(rows=4 * run.size))
    tokens = next(iter(trainer.loader))[0]

    def step() -> None:
        with trainer.accelerator.accumulate(trainer.model):
            trainer.accelerator.backward(loss_of(trainer.model, tokens))
            trainer.accelerator.clip_grad_norm_(trainer.model.parameters(), 1.0)
            trainer.optimizer.step()
            trainer.optimizer.zero_grad()

    assert_detects(run)
    watched(run, step, "a step")


@check(on="accelerator")
def step(run: Run) -> None:
    """accumulate, backward, clip_grad_norm_, step, zero_grad: one device."""
    loop(run)


@check(on="accelerator", devices=ALL)
def step_ddp(run: Run) -> None:
    """The same under DDP, in bf16."""
    loop(run, "bf16")


@check(on="accelerator", devices=ANY)
def step_fsdp(run: Run) -> None:
    """The same under FSDP, in bf16."""
    from accel_fsdp import FSDP

    loop(run, "bf16", strategy=FSDP())


@check(on="cuda")
def step_fused_fp16(run: Run) -> None:
    """fp16 with a fused optimizer, which takes the scale: no wait."""
    accelerator = run.accelerator(mixed_precision="fp16")
    model = torch.nn.Linear(64, 64)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), fused=True))
    x = torch.randn(8, 64, device=run.device)

    def step() -> None:
        accelerator.backward(model(x).square().mean())
        optimizer.step()
        optimizer.zero_grad()

    step()
    watched(run, step, "a step of fp16")


@check(on="accelerator", devices=ANY)
def window(run: Run) -> None:
    """`forward_backward`, with weights that are numbers and that are tensors."""
    accelerator = run.accelerator()
    model = accelerator.prepare(torch.nn.Linear(8, 1))
    batches = [torch.randn(4, 8, device=run.device) for _ in range(2)]
    weight = torch.tensor(4.0, device=run.device)
    for given, what in ((4, "numbers"), (weight, "tensors")):

        def call(given: Any = given) -> None:
            accelerator.forward_backward(
                model, batches, lambda output, _: (output.square().sum(), given), lambda batch: ((batch,), {})
            )

        watched(run, call, f"forward_backward with {what}")


@check(on="accelerator", devices=ALL)
def collectives(run: Run) -> None:
    """gather, reduce, check_trigger, should_stop."""
    accelerator = run.accelerator()
    x = torch.ones(16, device=run.device)
    accelerator.stop_on_signal()
    for what, call in (
        ("gather", lambda: accelerator.gather(x)),
        ("reduce", lambda: accelerator.reduce(x, "mean")),
        ("check_trigger", accelerator.check_trigger),
        ("should_stop", accelerator.should_stop),
    ):
        watched(run, call, what)


@check(on="accelerator", devices=ANY)
def metrics(run: Run) -> None:
    """gather_for_metrics, over a loader."""
    accelerator = run.accelerator()
    loader = accelerator.prepare(torch.utils.data.DataLoader(torch.arange(16.0 * run.size).view(-1, 1), batch_size=4))
    for number, batch in enumerate(loader):
        if number in (1, 2):
            with no_waits(run):
                accelerator.gather_for_metrics(batch)
        else:
            accelerator.gather_for_metrics(batch)


@check(on="accelerator")
def loading(run: Run) -> None:
    """Batches out of pinned memory."""
    accelerator = run.accelerator()
    data = make_data(4).tensors[0]
    loader = accelerator.prepare(torch.utils.data.DataLoader(data, batch_size=4, pin_memory=True))
    batches = iter(loader)
    next(batches)
    with no_waits(run):
        for _ in range(3):
            next(batches)


@check(on="accelerator")
def logging(run: Run) -> None:
    """`log` of scalars that the device has still to compute."""
    accelerator = run.accelerator(log_with=Listener())
    accelerator.init_trackers("waits")
    value = torch.ones(4, device=run.device)
    watched(run, lambda: accelerator.log({"loss": value.sum()}), "log")
    accelerator.end_training()


@check(on="accelerator")
def lazy_save(run: Run) -> None:
    """`save_state(asynchronous="lazy")` of prepared parameters returns without a wait."""
    trainer = Trainer(run, 2, {})
    trainer.train()
    trainer.accelerator.save_state(run.folder / "first", asynchronous="lazy")
    trainer.accelerator.wait_for_checkpoint()
    with no_waits(run):
        trainer.accelerator.save_state(run.folder / "second", asynchronous="lazy")
    trainer.accelerator.wait_for_checkpoint()
