"""The request for one loader, and what follows from it for every kind of loader."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.utils.data import DistributedSampler, IterableDataset, IterDataPipe

from accel_core import Feed, Shard, World
from accel_core.api.component import agree_seed, as_rng_types, synchronize_random_states
from accel_core.api.loader import Outlet, index_sampler, length_of
from accel_data.batches import BatchSamplerShard
from accel_data.configuration import DataLoaderConfiguration
from accel_data.loader_fingerprint import Identity

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup
    from torch.utils.data import DataLoader

    from accel_data.generators import Synchronise


@dataclass(frozen=True)
class Request:
    """The request for one loader: its part of the data, its options, and its outlet.

    `feed` is where iterators report; `number`: how many loaders were prepared before; `group`: the
    ranks that share a global batch, None: the world; `slice_fn`: the user's, which cuts a batch;
    `classes`: what loaders that read by themselves, and dispatched ones, become, None: our own.
    """

    shard: Shard
    feed: Feed
    device: torch.device | None
    seed: int
    number: int
    group: ProcessGroup | None
    slice_fn: Callable[..., Any] | None
    options: DataLoaderConfiguration
    rng_types: tuple[str, ...]
    classes: tuple[type[Any], type[Any]] | None = None

    @classmethod
    def alone(cls, device: torch.device | None, rng_types: Iterable[str] | None) -> Request:
        """All of the data, for nobody's Accelerator. A collective in a world larger than one."""
        seed, options = agree_seed(World.current()), DataLoaderConfiguration()
        return cls(Shard(0, 1), Feed(), device, seed, 0, None, None, options, named(rng_types))

    def to_read(self) -> Request:
        """The request of the process that reads for all: all of the data, as one part."""
        return replace(self, shard=Shard(0, 1), feed=Feed(), device=None, rng_types=())

    def to_dispatch(self, shard: Shard, split_batches: bool, slice_fn: Callable[..., Any] | None) -> Request:
        """The request for a loader that one process reads for all."""
        options = replace(self.options, split_batches=split_batches, dispatch_batches=True)
        return replace(self, shard=shard, options=options, slice_fn=slice_fn)

    def outlet(self) -> Outlet:
        """The outlet of the loader: its feed, and the device for its batches."""
        return Outlet(self.feed, self.device, self.options.non_blocking)

    def identity(self, loader: DataLoader[Any]) -> Identity:
        """The identity of the loader, which tells its positions from those of others."""
        stream = isinstance(loader.dataset, IterableDataset)
        # Of a stream that is shared out, the workers take turns, or a position tells how far each has come.
        shared = stream and self.shard.count > 1
        workers = max(1, loader.num_workers) if stream and not shared else None
        return Identity(self.seed, self.number, length_of(loader.dataset), self._order(loader), workers)

    def _order(self, loader: DataLoader[Any]) -> str:
        if isinstance(loader.dataset, IterableDataset):
            return type(loader.dataset).__qualname__
        sampler = index_sampler(loader)
        if isinstance(sampler, BatchSamplerShard):
            sampler = sampler.batch_sampler
        inner = getattr(sampler, "sampler", None)
        names = [type(each).__qualname__ for each in (sampler, inner) if each is not None]
        return " of ".join(names) + (", seedable" if self.options.use_seedable_sampler else "")

    def synchronise(self) -> Synchronise | None:
        """The function that equalises random streams when an iteration begins; None if none are."""
        return partial(_synchronise, self.rng_types) if self.rng_types else None


def named(rng_types: Iterable[str] | None) -> tuple[str, ...]:
    """The names of random streams; None stands for "generator". Raises for unknown ones."""
    return ("generator",) if rng_types is None else as_rng_types("rng_types", list(rng_types))


def refuse_unserved(asked: str, loader: DataLoader[Any], shard: Shard, presharded: bool = False) -> None:
    """Raises for what would be read twice, or could not be told apart, where data is shared out."""
    if shard.count == 1:
        return
    asked = f"{asked} was given a {type(loader).__name__} on {shard.count} data-parallel ranks"
    for sampler in _nested_samplers(index_sampler(loader)):
        if isinstance(sampler, BatchSamplerShard) and sampler.num_processes > 1:
            raise ValueError(
                f"{asked} with a BatchSamplerShard for {sampler.num_processes} processes: its part would be shared out again, and "
                f"most samples never read. Give the loader the batch sampler inside it, or leave it out of prepare()."
            )
        if isinstance(sampler, DistributedSampler) and sampler.num_replicas > 1:
            raise ValueError(
                f"{asked} with a DistributedSampler for {sampler.num_replicas} replicas: its part would be sharded again, and "
                f"most samples never read. Use shuffle={getattr(sampler, 'shuffle', True)} instead of the sampler, or leave the "
                f"loader out of prepare()."
            )
    if isinstance(loader.dataset, IterDataPipe):
        raise ValueError(
            f"{asked} over an IterDataPipe, which torch shares out among ranks itself where it has workers and a sharding_filter, "
            f"so samples would be lost. Pass an IterableDataset whose __iter__ does `yield from datapipe`, without a "
            f"sharding_filter; or leave the loader out of prepare()."
        )
    split = getattr(getattr(loader.dataset, "_distributed", None), "world_size", 1)
    if type(split) is int and split > 1 and not presharded:
        raise ValueError(
            f"{asked} whose dataset split_dataset_by_node() has split for {split} nodes: its part would be shared out again, and "
            f"most samples never read. Leave that call out; or say that every rank has a part of its own, by "
            f"DataLoaderConfiguration(presharded=True)."
        )
    if loader.num_workers and not loader.in_order and not getattr(loader.batch_sampler, "drop_last", False):
        raise ValueError(
            f"{asked} with in_order=False: a batch that was filled up to be even could not be told from the others. Use "
            f"in_order=True, or drop_last=True."
        )


def _nested_samplers(sampler: Any) -> list[Any]:
    """A sampler, and those that it takes its indices from; each once."""
    found: list[Any] = []
    waiting = [sampler]
    while waiting:
        each = waiting.pop()
        if each is not None and not any(each is other for other in found):
            found.append(each)
            waiting += [getattr(each, "batch_sampler", None), getattr(each, "sampler", None)]
    return found


def _synchronise(rng_types: tuple[str, ...], generators: list[torch.Generator]) -> None:
    if dist.is_available() and dist.is_initialized():  # reading the environment of a process that is alone takes time
        synchronize_random_states(rng_types, generators, World.current())
