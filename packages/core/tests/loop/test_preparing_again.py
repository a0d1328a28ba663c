"""Models that are equal by their values are different models."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel_core import Accelerator
from accel_core.api.component import gather_objects
from accel_core.collectives.operations import synchronize_rng_states
from accel_testing import run_ranks


@dataclass(unsafe_hash=True)
class Net(nn.Module):
    width: int

    def __post_init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(self.width, 1)


def test_models_that_compare_equal_are_prepared_each_for_itself() -> None:
    generator, discriminator = Net(3), Net(3)
    assert generator == discriminator
    accelerator = Accelerator(cpu=True)
    assert accelerator.prepare(generator) is generator
    assert accelerator.prepare(discriminator) is discriminator
    assert accelerator.unwrap_model(discriminator) is discriminator


class Lazy:
    """Stands for values on a disk."""

    def size(self, _: int = 0) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(index)


def test_a_dataset_of_objects_that_are_no_tensors_is_read() -> None:
    dataset = TensorDataset(Lazy())  # type: ignore[arg-type]
    dataset.__class__ = type("Of4", (TensorDataset,), {"__len__": lambda _: 4})
    loader = Accelerator(cpu=True).prepare(DataLoader(dataset, 2))
    assert [batch[0].tolist() for batch in loader] == [[0, 1], [2, 3]]


def synchronised_twice() -> list[float]:
    from accel_core import World

    world = World.current(cpu=True)
    torch.manual_seed(world.rank)
    synchronize_rng_states(["torch", "torch"])
    return gather_objects([torch.rand(1).item()], world)


def test_a_random_stream_that_is_named_twice_is_synchronised_once() -> None:
    for drawn in run_ranks(synchronised_twice, 2):
        assert len(set(drawn)) == 1
