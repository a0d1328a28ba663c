"""Small models, data with a global index, and what one process without any strategy makes of them.

The conformance suite holds a strategy against these references: plain torch, one process, the
global batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional as F

if TYPE_CHECKING:
    from accel_core import Shard

Gradients = dict[str, torch.Tensor]
State = dict[str, torch.Tensor]
Batch = tuple[torch.Tensor, torch.Tensor]
TokenBatch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

FEATURES = 6
ROWS = 4
"""Samples in the micro-batch of one shard."""

LEARNING_RATE = 0.1


class Net(nn.Module):
    """A backbone and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Linear(FEATURES, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, FEATURES) to (batch, 3)."""
        result: torch.Tensor = self.head(torch.tanh(self.backbone(x)))
        return result


class FrozenBackbone(Net):
    """Only the head is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone.requires_grad_(False)


class InheritedNet(FrozenBackbone):
    """Beside what is trained it has a frozen part, and a buffer that is drawn."""

    scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.rand(FEATURES))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, FEATURES) to (batch, 3)."""
        return super().forward(x * self.scale)


class TiedNet(nn.Module):
    """Encoder and decoder share one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(FEATURES, FEATURES)
        self.decoder = nn.Linear(FEATURES, FEATURES)
        self.decoder.weight = self.encoder.weight
        self.head = nn.Linear(FEATURES, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, FEATURES) to (batch, 3)."""
        result: torch.Tensor = self.head(self.decoder(torch.tanh(self.encoder(x))))
        return result


class NormNet(nn.Module):
    """A model with buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(FEATURES)
        self.head = nn.Linear(FEATURES, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, FEATURES) to (batch, 3)."""
        result: torch.Tensor = self.head(self.norm(x))
        return result


class ProbeNet(nn.Module):
    """Notes the dtypes that it meets."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Linear(FEATURES, 8)
        self.head = nn.Linear(8, 3)
        self.seen: dict[str, torch.dtype] = {}

    def forward(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """(batch, FEATURES) and integers to (batch, 3)."""
        hidden = self.backbone(x)
        self.seen = {"input": x.dtype, "integers": index.dtype, "compute": hidden.dtype}
        result: torch.Tensor = self.head(torch.tanh(hidden))
        return result


def built(net: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """A model whose weights depend on `seed` only; the caller's random stream is left alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return net()


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.SGD:
    """The optimizer of all comparisons, in two groups where there is more than one parameter."""
    every = list(parameters)
    groups = [{"params": group} for group in (every[::2], every[1::2]) if group]
    return torch.optim.SGD(groups, lr=LEARNING_RATE, momentum=0.9)


class PlainSGD:
    """The updates of `sgd`, without an optimizer of torch.

    The first one in a process costs seconds of imports, and sets variables.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.rate = LEARNING_RATE
        self._parameters = list(parameters)
        self._momenta: dict[nn.Parameter, torch.Tensor] = {}

    def step(self) -> None:
        """Moves every parameter that has a gradient."""
        with torch.no_grad():
            for parameter in self._parameters:
                if parameter.grad is not None:
                    before = self._momenta.get(parameter, torch.zeros_like(parameter))
                    self._momenta[parameter] = 0.9 * before + parameter.grad
                    parameter.sub_(self._momenta[parameter], alpha=self.rate)

    def zero_grad(self) -> None:
        """Drops the gradients."""
        for parameter in self._parameters:
            parameter.grad = None


def samples(first: int, count: int) -> Batch:
    """Samples `first`, `first + 1`, … of an endless data set: (count, FEATURES) and (count, 3)."""
    table = torch.arange(first, first + count, dtype=torch.float32)[:, None]
    columns = torch.arange(1, FEATURES + 1, dtype=torch.float32)
    return torch.sin(table * columns * 0.7 + columns), torch.cos(table * columns[:3] * 0.3 + columns[:3])


def part(micro_batch: int, shard: Shard) -> Batch:
    """The samples that one shard reads of a global micro-batch."""
    return samples((micro_batch * shard.count + shard.index) * ROWS, ROWS)


def whole(micro_batches: Sequence[int], count: int) -> Batch:
    """The samples of all `count` shards in consecutive global micro-batches, as one batch."""
    return samples(micro_batches[0] * count * ROWS, len(micro_batches) * count * ROWS)


def token_batch(index: int, rows: int, real: int) -> TokenBatch:
    """A micro-batch of which only the first `real` rows count."""
    x, y = samples(1000 + 100 * index, rows)
    return x, y, torch.arange(rows) < real


def token_loss(output: torch.Tensor, batch: TokenBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """The summed loss of the rows that count, and how many they are."""
    _, y, mask = (tensor.to(output.device) for tensor in batch)
    return (F.mse_loss(output, y, reduction="none").sum(1) * mask).sum(), mask.sum()


def gradients(model: nn.Module) -> Gradients:
    """Copies of the gradients that are there, by name."""
    return {name: value.grad.clone() for name, value in model.named_parameters() if value.grad is not None}


def reference_gradients(
    micro_batches: Sequence[int], count: int, net: Callable[[], nn.Module] = Net, seed: int = 0
) -> Gradients:
    """The gradient of the mean loss over what `count` shards read of these micro-batches."""
    model = built(net, seed)
    x, y = whole(micro_batches, count)
    F.mse_loss(model(x), y).backward()
    return gradients(model)


def reference_token_gradients(batches: Sequence[TokenBatch]) -> tuple[Gradients, float]:
    """The gradient of the mean loss over all rows that count, and that mean."""
    model = built(Net)
    x, y, mask = (torch.cat(parts) for parts in zip(*batches, strict=True))
    loss, weight = token_loss(model(x), (x, y, mask))
    (loss / weight).backward()
    return gradients(model), float(loss.detach() / weight)


def reference_state(
    windows: Sequence[Sequence[int]], count: int, net: Callable[[], nn.Module] = Net, factor: float = 1.0
) -> State:
    """The state after one optimizer step per window; each multiplies the rate by `factor`."""
    model = built(net)
    optimizer = PlainSGD(model.parameters())
    for micro_batches in windows:
        x, y = whole(micro_batches, count)
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        optimizer.rate *= factor
    return dict(model.state_dict())


Backward = Callable[[torch.Tensor], None]
Pair = tuple[nn.Module, nn.Module]
Optimizers = tuple["torch.optim.Optimizer | PlainSGD", "torch.optim.Optimizer | PlainSGD"]


class Critic(nn.Module):
    """Tells what the generator made from what the data holds."""

    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Linear(3, 1)

    def forward(self, y: torch.Tensor) -> torch.Tensor:
        """(batch, 3) to (batch, 1)."""
        result: torch.Tensor = self.score(torch.tanh(y))
        return result


def adversarial_step(models: Pair, optimizers: Optimizers, backwards: tuple[Backward, Backward], batch: Batch) -> None:
    """One step of a critic, then one of the generator that it judges; each has its own backward."""
    (generator, critic), (x, y) = models, batch
    optimizers[1].zero_grad()
    backwards[1](critic(generator(x).detach()).mean() - critic(y).mean())
    optimizers[1].step()
    optimizers[0].zero_grad()
    backwards[0](-critic(generator(x)).mean())
    optimizers[0].step()


def reference_adversaries(steps: int, count: int) -> tuple[State, State]:
    """Both states after some steps in one process."""
    models = built(Net), built(Critic, 1)
    optimizers = PlainSGD(models[0].parameters()), PlainSGD(models[1].parameters())
    for step in range(steps):
        adversarial_step(models, optimizers, (torch.Tensor.backward, torch.Tensor.backward), whole([step], count))
    return dict(models[0].state_dict()), dict(models[1].state_dict())
