"""Compares training under the configured strategy and precision with that of one process."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional as F

from accel_core import broadcast_object_list
from accel_launch.checking.steps import CheckError, Passed

if TYPE_CHECKING:
    from accel_core import Accelerator, Shard

Batch = tuple[torch.Tensor, torch.Tensor]

WIDTH, ROWS, STEPS = 32, 16, 6

_TOLERANCES, _ROUGH = {"no": 1e-4, "fp32": 1e-4, "fp16": 2e-2, "bf16": 1e-1}, 0.2
"""By precision, and for others: how far weights may be from those of one process in full precision, as a part of the way that they
have come. Ranks that do not average their gradients are further off than that way itself."""


class Training:
    """A small model that trains as configured, on each rank's `shard` of each batch."""

    def __init__(self, accelerator: Accelerator, shard: Shard) -> None:
        self.accelerator, self.shard = accelerator, shard
        user_model = _make_model()
        self.reference = copy.deepcopy(user_model).to(accelerator.device)
        self.initial = copy.deepcopy(self.reference).state_dict()
        self._its_optimizer = _make_optimizer(self.reference)
        self.model, self.optimizer = accelerator.prepare(user_model, _make_optimizer(user_model))
        self._batches = _batches(shard.count, accelerator.device)

    def take(self, count: int) -> list[Batch]:
        """The next global batches."""
        return [next(self._batches) for _ in range(count)]

    def step(self, batch: Batch, micro_batches: int = 1) -> float:
        """Trains on a rank's part of a batch, in one step; returns the loss of all. Collective."""
        losses = []
        for x, y in zip(*(_micro_batches(each, micro_batches) for each in batch), strict=True):
            with self.accelerator.accumulate(self.model):
                loss = F.mse_loss(self.model(self._own(x)).float(), self._own(y))
                self.accelerator.backward(loss)
                self.optimizer.step()
                self.optimizer.zero_grad()
            losses.append(loss.detach())
        return float(self.accelerator.reduce(torch.stack(losses).mean(), "mean"))

    def follow(self, batch: Batch) -> None:
        """Does in one process what the last `step` did."""
        inputs, targets = batch
        F.mse_loss(self.reference(inputs), targets).backward()
        if not self.accelerator.optimizer_step_was_skipped:  # by a scaler that has met an overflow
            self._its_optimizer.step()
        self._its_optimizer.zero_grad()

    def weights(self) -> dict[str, torch.Tensor]:
        """A copy of the whole weights on the main process; may be empty on others. Collective."""
        return {name: value.detach().clone() for name, value in self.accelerator.get_state_dict(self.model).items()}

    def _own(self, batch: torch.Tensor) -> torch.Tensor:
        return batch.chunk(self.shard.count)[self.shard.index]

    def deviation(self) -> float:
        """Distance to one process's weights, relative to their change; everywhere. Collective."""
        weights = self.weights()
        told: list[Any] = [None]
        if self.accelerator.is_main_process:
            expected = self.reference.state_dict()
            missing = expected.keys() ^ weights.keys()
            off = sum(_squares(weights[name], expected[name]) for name in expected) if not missing else float("inf")
            way = sum(_squares(self.initial[name], expected[name]) for name in expected)
            told = [(off / way) ** 0.5]
        deviation: float = broadcast_object_list(told)[0]
        return deviation


def check_training(accelerator: Accelerator, shard: Shard, micro_batches: int = 1) -> Passed:
    """Checks that steps of `micro_batches` each end where one process's do. Collective."""
    training = Training(accelerator, shard)
    losses = []
    for batch in training.take(STEPS):
        losses.append(training.step(batch, micro_batches))
        training.follow(batch)
    deviation, allowed = training.deviation(), _TOLERANCES.get(accelerator.mixed_precision, _ROUGH)
    steps = f"{STEPS} steps" + (f" of {micro_batches} micro-batches" if micro_batches > 1 else "")
    if not deviation <= allowed:  # nan is no pass
        raise CheckError(
            f"After {steps} the weights should be those of one process, give or take {allowed:g} of the way that they "
            f"have come. They are {deviation:.2g} of it apart, with the losses "
            f"{', '.join(f'{loss:.4f}' for loss in losses)}. The strategy or the precision is at fault: try again with "
            "--mixed-precision no, and with another --strategy."
        )
    return Passed(f"{steps} equal one process to {deviation:.1e} (allowed: {allowed:g})")


def _squares(first: torch.Tensor, second: torch.Tensor) -> float:
    return float((first.cpu().double() - second.cpu().double()).square().sum())


def _make_model() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        return nn.Sequential(
            nn.Linear(WIDTH, 2 * WIDTH),
            nn.GELU(),
            nn.Linear(2 * WIDTH, 2 * WIDTH),
            nn.GELU(),
            nn.Linear(2 * WIDTH, WIDTH),
        )


def _make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    # Steps that are long beside the roundings of bfloat16 weights; and gradients that are summed instead of averaged show.
    return torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)


def _batches(shards: int, device: torch.device) -> Iterator[Batch]:
    """Global batches; neighbouring shards want opposite targets: ranks left alone drift apart."""
    generator = torch.Generator().manual_seed(11)
    while True:
        x = torch.randn(shards * ROWS, WIDTH, generator=generator)
        sign = 1.0 - 2.0 * (torch.arange(shards) % 2).repeat_interleave(ROWS)[:, None]
        yield x.to(device), (x.roll(1, 1) * sign + sign * 2).to(device)


def _micro_batches(batch: torch.Tensor, count: int) -> list[torch.Tensor]:
    """Micro-batches of a global batch, each with its part of every shard."""
    rows = batch.unflatten(0, (-1, count, ROWS // count))
    return [rows[:, number].flatten(0, 1) for number in range(count)]
