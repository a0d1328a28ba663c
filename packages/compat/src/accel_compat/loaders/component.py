"""The loader component of the Accelerator: accel-data's, which makes loaders of the classes here."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader

import accel_data
from accel_compat.loaders.prepared import CLASSES
from accel_compat.loaders.stateful import as_stateful
from accel_core import Feed, Shard, hookimpl

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Loaders(accel_data.Sharded):
    """Each process reads its part of every global batch: see `accel_data.Sharded`."""

    classes = CLASSES
    use_stateful_dataloader: bool

    @hookimpl
    def prepare_loader(
        self,
        loader: DataLoader[Any],
        shard: Shard,
        feed: Feed,
        device: torch.device | None,
        seed: int,
        number: int = 0,
        group: ProcessGroup | None = None,
        slice_fn: Callable[..., Any] | None = None,
    ) -> DataLoader[Any]:
        """A copy of the loader that gives one shard, of torchdata's class where that is asked for."""
        given = as_stateful(loader) if self.use_stateful_dataloader else loader
        prepared = super().prepare_loader(given, shard, feed, device, seed, number, group, slice_fn)
        prepared.use_stateful_dataloader = self.use_stateful_dataloader
        return prepared
