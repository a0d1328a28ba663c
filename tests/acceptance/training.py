"""A small GPT, and what one device makes of it by plain torch: what every other way of training is compared with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from acceptance.registry import Run
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

PLAN = {"blocks.*.q": "colwise", "blocks.*.k": "colwise", "blocks.*.v": "colwise", "blocks.*.out": "rowwise"}
PLAN |= {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}


@dataclass(frozen=True)
class Shape:
    """Sizes of a model and its batches. `rows` are those of a global batch."""

    vocabulary: int = 256
    width: int = 64
    heads: int = 8
    layers: int = 3
    length: int = 32
    rows: int = 8
    dropout: float = 0.0


SMALL = Shape()


class Block(nn.Module):
    """It lets torch count the heads, so that a tensor-parallel peer may hold some of them."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width = shape.width
        self.head_size, self.dropout = width // shape.heads, shape.dropout
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.norm_1(x)
        q, k, v = (
            each(normed).unflatten(-1, (-1, self.head_size)).transpose(1, 2) for each in (self.q, self.k, self.v)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + F.dropout(self.out(attended.transpose(1, 2).flatten(2)), self.dropout, self.training)
        return x + self.down(F.dropout(F.gelu(self.up(self.norm_2(x))), self.dropout, self.training))


class GPT(nn.Module):
    """(batch, length) tokens and their positions to (batch, length, vocabulary) logits."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(shape.vocabulary, shape.width), nn.Embedding(shape.length, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm, self.head = nn.LayerNorm(shape.width), nn.Linear(shape.width, shape.vocabulary, bias=False)
        for table in (self.token, self.position):
            nn.init.normal_(table.weight, std=0.2)

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x = self.token(tokens) + self.position(positions)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def make_model(shape: Shape = SMALL) -> GPT:
    torch.manual_seed(11)
    return GPT(shape)


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """SGD: it shows how large gradients are, which Adam hides."""
    return torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)


def make_data(steps: int, shape: Shape = SMALL) -> TensorDataset:
    """Tokens that can be learned: each is the one before it, plus a number of its row."""
    generator = torch.Generator().manual_seed(5)
    rows = steps * shape.rows
    start = torch.randint(shape.vocabulary, (rows, 1), generator=generator)
    pace = torch.randint(1, 9, (rows, 1), generator=generator)
    return TensorDataset((start + pace * torch.arange(shape.length + 1)) % shape.vocabulary)


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    inputs, labels = tokens[:, :-1], tokens[:, 1:]
    positions = torch.arange(inputs.shape[1], device=tokens.device).expand_as(inputs)
    return F.cross_entropy(model(inputs, positions).flatten(0, 1).float(), labels.flatten())


@dataclass
class Curve:
    """What the steps of a training were: the mean loss, and the norm of the whole gradient."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)

    def distance(self, other: Curve) -> float:
        """The largest difference of two losses, or relative difference of two norms."""
        assert len(self.losses) == len(other.losses) > 0, (self, other)
        values = [abs(a - b) for a, b in zip(self.losses, other.losses, strict=True)]
        norms = [abs(a - b) / max(b, 1e-6) for a, b in zip(self.norms, other.norms, strict=True)]
        return max(*values, *norms)


def reference(run: Run, steps: int, dtype: torch.dtype | None = None, shape: Shape = SMALL) -> Curve:
    """One device, by plain torch, over whole batches; under autocast to `dtype`."""
    model, curve = make_model(shape).to(run.device), Curve()
    optimizer = make_optimizer(model)
    for (tokens,) in DataLoader(make_data(steps, shape), batch_size=shape.rows):
        with torch.autocast(run.device.type, dtype) if dtype is not None else nullcontext():
            loss = loss_of(model, tokens.to(run.device))
        loss.backward()
        curve.norms.append(nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        curve.losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return curve


class Trainer:
    """The same by an Accelerator, with `options`; in as many processes as there are."""

    def __init__(
        self, run: Run, steps: int, options: Mapping[str, Any], shape: Shape = SMALL, split: bool = False
    ) -> None:
        self.accelerator = run.accelerator(split_batches=True, **options)
        self.split = split  # sequences, over context-parallel peers
        model = make_model(shape)
        loader = DataLoader(make_data(steps, shape), batch_size=shape.rows)
        self.model, self.optimizer, self.loader = self.accelerator.prepare(model, make_optimizer(model), loader)

    def train(self, save_at: int | None = None, folder: Path | None = None) -> Curve:
        """The steps of one epoch, or of what is left of it; one that is left out has no norm."""
        curve = Curve()
        for (tokens,) in self.loader:
            loss, norm = self.step(tokens)
            if not self.accelerator.optimizer_step_was_skipped:
                curve.norms.append(norm)
            curve.losses.append(loss)
            if len(curve.losses) == save_at:
                self.accelerator.save_state(folder)
        return curve

    def step(self, tokens: torch.Tensor) -> tuple[float, float]:
        loss = self.split_backward(tokens) if self.split else loss_of(self.model, tokens)
        if not self.split:
            self.accelerator.backward(loss)
        norm = self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return self.accelerator.reduce(loss.detach(), "mean").item(), float(norm)

    def split_backward(self, tokens: torch.Tensor) -> torch.Tensor:
        inputs, labels = tokens[:, :-1].clone(), tokens[:, 1:].clone()
        positions = torch.arange(inputs.shape[1], device=tokens.device).expand_as(inputs).clone()
        with self.accelerator.maybe_context_parallel([inputs, labels, positions], [1, 1, 1]):
            assert inputs.shape[1] == (tokens.shape[1] - 1) // 2, "the sequence is not cut in two"
            loss = F.cross_entropy(self.model(inputs, positions).flatten(0, 1).float(), labels.flatten())
            self.accelerator.backward(loss)
        return loss


def assert_near(found: Curve, expected: Curve, tolerance: float) -> str:
    distance = found.distance(expected)
    assert distance <= tolerance, f"{distance:.2e} off, where {tolerance:.0e} is allowed: {found}, expected {expected}"
    assert min(expected.losses[1:]) < expected.losses[0], f"the reference does not learn: {expected}"
    return f"within {distance:.1e}"


def parameters_of(values: Sequence[torch.Tensor]) -> int:
    return sum(value.numel() for value in values)
