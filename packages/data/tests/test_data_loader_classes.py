"""A component may make loaders of classes of its own."""

from __future__ import annotations

from torch.utils.data import DataLoader

from accel_core import Accelerator
from accel_data import DataLoaderDispatcher, DataLoaderShard, Sharded, prepare_data_loader


class Told(DataLoaderShard):
    def far(self) -> list[int | None]:
        return [self.running.remaining for _ in self]


class OfItsOwn(Sharded):
    classes = (Told, DataLoaderDispatcher)


def test_prepared_loaders_are_of_the_classes_of_their_component():
    loader = Accelerator(loader=OfItsOwn()).prepare(DataLoader(range(6), batch_size=2))
    assert isinstance(loader, Told)
    assert loader.running is None
    assert loader.far() == [2, 1, 0]
    assert loader.running is None
    alone = prepare_data_loader(DataLoader(range(6), batch_size=2), classes=OfItsOwn.classes)
    assert alone.far() == [2, 1, 0]
