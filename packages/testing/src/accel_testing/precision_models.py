"""The precision suite's model and reference: full precision, one process, global batches.

Sizes are multiples of 32, because formats of eight bits and less work on blocks of so many numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional as F

from accel_testing.models import Batch, Gradients, PlainSGD, built

if TYPE_CHECKING:
    from accel_core import Shard

WIDTH = 32
ROWS = 32
"""Samples in the micro-batch of one shard."""

LEARNING_RATE = 0.5
Windows = Sequence[Sequence[int]]
"""For each optimizer step the numbers of its global micro-batches."""


class Pupil(nn.Module):
    """Learns, notes the dtypes that it meets, and returns mappings, tuples, integers and bools.

    It has a layer between the first and the last one, which narrow formats often leave as they are.
    Of `shift` it returns the first number alone, so that a gradient of one number may overflow,
    which under a strategy that shards parameters is in the memory of a single rank.
    """

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Linear(WIDTH, 2 * WIDTH)
        self.body = nn.Linear(2 * WIDTH, 2 * WIDTH)
        self.head = nn.Linear(2 * WIDTH, WIDTH)
        self.shift = nn.Parameter(torch.full((WIDTH,), 0.1))
        self.seen: dict[str, torch.dtype] = {}
        self.made: dict[str, torch.dtype] = {}

    def forward(self, x: torch.Tensor, marks: dict[str, torch.Tensor] | None = None) -> dict[str, Any]:
        """(batch, WIDTH), and marks by name, to "logits" (batch, WIDTH) and others."""
        hidden = torch.tanh(self.backbone(x))
        raw = self.body(hidden)
        logits = self.head(hidden + torch.tanh(raw)) + self.shift
        marks = marks or {}
        self.seen = {"x": x.dtype, "compute": raw.dtype, **{name: mark.dtype for name, mark in marks.items()}}
        output = {"logits": logits, "shift": self.shift[:1], "more": (raw, marks)}
        self.made = dtypes_of(output)
        return output


def dtypes_of(output: dict[str, Any]) -> dict[str, torch.dtype]:
    """The dtype of each leaf of what a `Pupil` returns."""
    raw, marks = output["more"]
    leaves = {"logits": output["logits"], "shift": output["shift"], "raw": raw, **marks}
    return {name: leaf.dtype for name, leaf in leaves.items()}


def marks_for(x: torch.Tensor) -> dict[str, torch.Tensor]:
    """Integers, bools, and floating numbers inside a mapping, one for each row."""
    index = torch.arange(len(x), device=x.device)
    return {"integers": index, "bools": index > 1, "nested": index.float()}


def samples(first: int, count: int) -> Batch:
    """Samples `first`, `first + 1`, … of an endless data set: inputs and targets (count, WIDTH)."""
    rows = torch.arange(first, first + count, dtype=torch.float32)[:, None]
    columns = torch.arange(1, WIDTH + 1, dtype=torch.float32)
    x = torch.sin(rows * columns * 0.7 + columns)
    return x, 0.5 * x.roll(1, 1) + 0.5


def part(micro_batch: int, shard: Shard) -> Batch:
    """The samples that one shard reads of a global micro-batch."""
    return samples((micro_batch * shard.count + shard.index) * ROWS, ROWS)


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.SGD:
    """The optimizer of all comparisons."""
    return torch.optim.SGD(parameters, lr=LEARNING_RATE, momentum=0.9)


def reference_losses(windows: Windows, count: int, rate: float = LEARNING_RATE) -> list[float]:
    """Mean losses of windows of what `count` shards read, with an optimizer step after each."""
    model = built(Pupil)
    optimizer = PlainSGD(model.parameters())
    optimizer.rate = rate
    losses = []
    for micro_batches in windows:
        loss = _backward(model, micro_batches, count)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss)
    return losses


def reference_gradients(micro_batches: Sequence[int], count: int) -> Gradients:
    """The gradients of the mean loss over what `count` shards read of these micro-batches."""
    model = built(Pupil)
    _backward(model, micro_batches, count)
    return {name: value.grad for name, value in model.named_parameters() if value.grad is not None}


def _backward(model: nn.Module, micro_batches: Sequence[int], count: int) -> float:
    x, y = samples(micro_batches[0] * count * ROWS, len(micro_batches) * count * ROWS)
    loss = F.mse_loss(model(x)["logits"], y)
    loss.backward()
    return float(loss.detach())
