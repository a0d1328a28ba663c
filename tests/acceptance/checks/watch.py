"""Ranks that do not come together are named within a minute, wherever the host of the others waits."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from acceptance.registry import Run, check
from acceptance.training import Shape, Trainer, loss_of

from accel_core import Accelerator


def names(*words: str) -> Callable[[Sequence[Any]], str]:
    """A judge: rank 0 ended by itself, and said these words of rank 1."""

    def judge(reports: Sequence[Any]) -> str:
        first = reports[0]
        assert "killed" not in first.state, f"rank 0 {first.state}: nobody ended it"
        assert first.failed, "rank 0 returned, as if nothing had happened"
        said = f"{first.traceback}\n{first.output}"
        missing = [word for word in ("rank 1", *words) if word not in said]
        assert not missing, f"rank 0 {first.state} and did not say {missing}: {said[-1500:]}"
        return f"said {words[0]!r}"

    return judge


def train(run: Run, disturb: Callable[[Accelerator], None], read: bool = True) -> None:
    """Steps of DDP, for as long as it goes; `read`: the host waits for each loss."""
    trainer = Trainer(run, 1, {}, Shape(rows=4 * run.size))
    (tokens,) = next(iter(trainer.loader))
    for step in range(1_000_000):
        if run.rank == 1 and step == 5:
            disturb(trainer.accelerator)
        loss = loss_of(trainer.model, tokens)
        trainer.accelerator.backward(loss)
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()
        if read:
            loss.item()


def stop(_: Accelerator) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


@check(devices=2, judge=names("was stopped"), seconds=75, long=True)
def stopped_in_item(run: Run) -> None:
    """A rank is stopped; the host of the other waits in `loss.item()`."""
    train(run, stop)


@check(devices=2, judge=names("was stopped"), seconds=75, long=True)
def stopped_with_full_queue(run: Run) -> None:
    """A rank is stopped; the other never reads a value, and waits when the queue of its device is full."""
    train(run, stop, read=False)


@check(devices=2, judge=names("was stopped"), seconds=75, long=True)
def stopped_in_a_collective(run: Run) -> None:
    """A rank is stopped; the other waits in `gather`."""
    accelerator = run.accelerator()
    value = torch.ones(1 << 20, device=run.device)
    for step in range(1_000_000):
        if run.rank == 1 and step == 5:
            stop(accelerator)
        accelerator.gather(value).sum().item()


def fail(_: Accelerator) -> None:
    raise ValueError("failed on purpose")


@check(devices=2, judge=names("failed on purpose"), seconds=75)
def failed(run: Run) -> None:
    """A rank raises: the other says so."""
    train(run, fail)


def die(_: Accelerator) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@check(devices=2, judge=names("without a word"), seconds=75, long=True)
def killed(run: Run) -> None:
    """A rank is killed: the other says so."""
    train(run, die)


@check(devices=2, judge=names("reduce('sum')", "rank 0: gather"), seconds=75)
def mismatch(run: Run) -> None:
    """Two ranks call different collectives: the error has the line of each."""
    accelerator = run.accelerator()
    value = torch.ones(1 << 20, device=run.device)
    for step in range(1_000_000):
        accelerator.reduce(value) if run.rank == 1 and step == 5 else accelerator.gather(value)


@check(devices=2, judge=names("wait_for_everyone()"), seconds=75)
def barrier_before_a_step(run: Run) -> None:
    """A rank waits at a barrier, and the other has begun its next step: the host of that one waits in `loss.item()`."""
    train(run, Accelerator.wait_for_everyone)


@check(devices=2, seconds=90)
def slow(run: Run) -> str:
    """A rank that computes on its host for long is nobody's failure: the other waits."""
    seconds = 2 if run.quick else 25
    accelerator = run.accelerator()
    if run.rank == 1:
        time.sleep(seconds)
    total = accelerator.reduce(torch.ones(1, device=run.device))
    assert total.item() == 2
    return f"waited {seconds} s"
