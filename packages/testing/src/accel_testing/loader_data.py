"""The datasets of the loader suite: a sample is its own number, so it can be counted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from accel_core import Layout, Shard, Strategy, hookimpl
from accel_core.api.component import to_device

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.optim import Optimizer

    from accel_core import PrepareRequest, World

BROKEN = 5
"""The sample that `Breaking` cannot read."""


@dataclass(frozen=True)
class Case:
    """The size of a dataset, and the options of the loader that reads it."""

    samples: int
    batch: int
    drop_last: bool = False


CASES = (
    Case(24, 4),
    Case(22, 4),
    Case(13, 2),
    Case(1, 4),
    Case(24, 4, drop_last=True),
    Case(13, 2, drop_last=True),
)


class Numbers(Dataset[int]):
    """Sample `i` is the number `i`."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        return int(index)


class Records(Numbers):
    """Samples with all that a batch may hold: several dtypes, texts, nested containers."""

    def __getitem__(self, index: int) -> Any:
        return {
            "id": index,
            "x": torch.full((3,), float(index)),
            "half": torch.tensor(index / 2, dtype=torch.float16),
            "text": f"sample {index}",
            "pair": (index % 2 == 0, {"byte": torch.tensor([index], dtype=torch.uint8)}),
        }


class Draws(Numbers):
    """Each sample is a random number, as augmentation draws it."""

    def __getitem__(self, index: int) -> int:
        return int(torch.randint(2**62, ()))


class Breaking(Numbers):
    """One of its samples raises."""

    def __getitem__(self, index: int) -> int:
        if index == BROKEN:
            raise ValueError(f"sample {index} is broken")
        return int(index)


class Counting(IterableDataset[int]):
    """Yields 0, 1, …, `size` - 1, and does not know how many that is."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[int]:
        yield from range(self.size)


class Backwards:
    """A user's sampler: from the last sample to the first."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.size - 1, -1, -1))

    def __len__(self) -> int:
        return self.size


class GrowingBatches:
    """A user's batch sampler: batches of 1, 2, 3, 1, 2, 3, … samples, and no `batch_size`."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[list[int]]:
        start, rows = 0, 1
        while start < self.size:
            yield list(range(start, min(start + rows, self.size)))
            start, rows = start + rows, rows % 3 + 1

    def __len__(self) -> int:
        return sum(1 for _ in self)


class LabelledLoader(DataLoader[Any]):
    """A loader class of somebody's own, with an attribute and a method."""

    def __init__(self, dataset: Dataset[Any], label: str, **kwargs: Any) -> None:
        super().__init__(dataset, **kwargs)
        self.label = label

    def shout(self) -> str:
        """The label in capitals."""
        return self.label.upper()


class Teams(Strategy):
    """Ranks in teams, as under tensor parallelism, read the same part of the data; trains nothing.

    The team is half the world, or all of it where that has no half, so there are fewer parts than
    ranks.
    """

    @hookimpl
    def layout(self, world: World) -> Layout:
        """Neighbouring ranks are a team."""
        count = parts_of_teams(world.size)
        team = world.size // count
        shard = Shard(world.rank // team, count)
        if world.size == 1:
            return Layout(shard)
        groups = [world.subgroup(range(place, world.size, team)) for place in range(team)]
        return Layout(shard, groups[world.rank % team])

    @hookimpl
    def prepare_model(self, model: nn.Module, optimizers: Sequence[Optimizer], request: PrepareRequest) -> nn.Module:  # noqa: ARG002
        """Leaves the model as it is."""
        return model


def parts_of_teams(ranks: int) -> int:
    """Into how many parts `Teams` divides the data."""
    return ranks // 2 if ranks % 2 == 0 else 1


def described(batch: Any, device: torch.device) -> Any:
    """A batch as plain objects: of tensors dtype, shape, values, and whether on `device`."""
    if isinstance(batch, torch.Tensor):
        return ("tensor", str(batch.dtype), tuple(batch.shape), batch.tolist(), batch.device.type == device.type)
    if isinstance(batch, dict):
        return {key: described(value, device) for key, value in batch.items()}
    if isinstance(batch, (list, tuple)):
        return (type(batch).__name__, [described(value, device) for value in batch])
    return batch


def records_as_collated(ids: Sequence[int], device: torch.device) -> Any:
    """The batch that plain torch collates of these `Records` on the device, as `described`."""
    loader = DataLoader(Records(max(ids) + 1), batch_sampler=[list(ids)])
    (batch,) = loader
    return described(to_device(batch, device), device)
