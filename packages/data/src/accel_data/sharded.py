"""The loader component `sharded`: each rank reads its own part of a map-style dataset."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from accel_core.hookspecs import hookimpl
from accel_core.loading import Outlet, prepare_copy
from accel_data.loader import ShardedLoader
from accel_data.source import EpochSource

if TYPE_CHECKING:
    from accel_core.feed import Feed
    from accel_core.layout import Shard


class Sharded:
    """Every rank reads its own part of each global batch; the order is a function of seed and epoch.

    Args:
        split_batches: the loader's batch size is the global one, and each rank gets an equal piece of a batch. Otherwise
            it is the batch size of each rank.
        even_batches: fill an incomplete last global batch from the first samples of the epoch, so that all ranks see as
            many batches of one size; metrics leave the filling out. Otherwise the last batch may be short, and ranks may
            differ by one batch.
    """

    def __init__(self, split_batches: bool = False, even_batches: bool = True) -> None:
        self.split_batches = split_batches
        self.even_batches = even_batches

    @hookimpl
    def prepare_loader(
        self, loader: DataLoader[Any], shard: Shard, feed: Feed, device: torch.device | None, seed: int
    ) -> DataLoader[Any]:
        """A copy of the loader that reads one shard."""
        if shard.count > 1:
            _refuse_unserved(loader, shard.count)
        generator = torch.Generator() if shard.count > 1 and loader.num_workers else None
        source = EpochSource(
            loader,
            shard,
            seed,
            split_batches=self.split_batches,
            even_batches=self.even_batches,
            worker_generator=generator,
        )
        if shard.count > 1:
            source.batches()  # raises now for what cannot be split
        attributes: dict[str, Any] = {"_accel_source": source}
        if generator is not None:
            attributes["generator"] = generator
        strict = shard.count > 1
        return prepare_copy(loader, ShardedLoader, source, Outlet(feed, device), strict, **attributes)


def _refuse_unserved(loader: DataLoader[Any], ranks: int) -> None:
    """Raises for what would be read twice, or could not be told apart, in a world larger than one."""
    asked = f"prepare() was given a {type(loader).__name__} on {ranks} data-parallel ranks"
    if isinstance(loader.dataset, IterableDataset):
        raise ValueError(
            f"{asked} over {type(loader.dataset).__name__}, an IterableDataset: every rank would read all of it. This version "
            f"shards map-style datasets. Shard the iterable yourself, by rank and worker, and leave its loader out of "
            f"prepare()."
        )
    if loader.batch_sampler is None:
        raise ValueError(
            f"{asked} with batch_size=None, so there are no batches to share out. This version shards loaders that make "
            f"batches. Give it a batch_size or a batch_sampler; or a sampler that yields this rank's part, and leave it "
            f"out of prepare()."
        )
    sampler = getattr(loader.batch_sampler, "sampler", None)
    if isinstance(sampler, DistributedSampler) and sampler.num_replicas > 1:
        raise ValueError(
            f"{asked} with a DistributedSampler for {sampler.num_replicas} replicas: its part would be sharded again, and "
            f"most samples never read. Use shuffle={sampler.shuffle} instead of the sampler, or leave the loader out of "
            f"prepare()."
        )
    if loader.num_workers and not loader.in_order and not getattr(loader.batch_sampler, "drop_last", False):
        raise ValueError(
            f"{asked} with in_order=False: a batch that was filled up to be even could not be told from the others. Use "
            f"in_order=True, or drop_last=True."
        )
