"""Iterable datasets in workers that go on from epoch to epoch.

Such a worker keeps the copy of the dataset that it was started with, so what the main process tells
its own copy does not reach it. The epoch therefore stands in shared memory as well, and a worker
reads it when it begins a pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import IterableDataset, get_worker_info

from accel_data.worker_streams import watch

if TYPE_CHECKING:
    from torch.utils.data import DataLoader


def telling(loader: DataLoader[Any]) -> dict[str, Any]:
    """The attributes with which a copy of `loader` tells its workers the epoch; {} if none does."""
    if not loader.persistent_workers or not callable(getattr(loader.dataset, "set_epoch", None)):
        return {}
    return {"dataset": ToldStream(loader.dataset), "worker_init_fn": ToldStart(loader.worker_init_fn)}


class ToldStream(IterableDataset[Any]):
    """Stands for the user's iterable dataset in a prepared loader, with the same attributes."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self._epoch = torch.full((1,), -1, dtype=torch.int64, device="cpu").share_memory_()

    def set_epoch(self, epoch: int) -> None:
        """Passes the epoch on to the dataset, here and in workers that run already."""
        self._epoch[0] = epoch
        self.dataset.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        epoch = int(self._epoch)
        if get_worker_info() is not None and epoch >= 0:
            self.dataset.set_epoch(epoch)
        return iter(self.dataset)

    def __getattr__(self, name: str) -> Any:
        if name == "dataset" or name.startswith("__"):  # a copy that is being made has no attributes yet
            raise AttributeError(name)
        return getattr(self.dataset, name)


class ToldStart:
    """The `worker_init_fn` of a loader over a `ToldStream`: the user's, shown the user's dataset.

    Args:
        worker_init_fn: the user's, or None.
    """

    def __init__(self, worker_init_fn: Callable[[int], Any] | None) -> None:
        self.worker_init_fn = worker_init_fn

    def __call__(self, worker_id: int) -> None:
        """Runs in each worker, once, before it begins."""
        info = get_worker_info()
        assert info is not None
        stream: Any = info.dataset
        watch(info, stream.dataset)
        if self.worker_init_fn is not None:
            self.worker_init_fn(worker_id)
