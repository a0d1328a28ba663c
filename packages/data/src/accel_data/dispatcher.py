"""`DataLoaderDispatcher`: one rank reads, and sends the others their parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from accel_core import Shard, World
from accel_core.api.loader import overridden_copy
from accel_data.dispatching import DispatchSource
from accel_data.loader import DataLoaderShard, as_plain, check_skipped, dress_made, reading_part
from accel_data.positioned_loader import PositionedLoader
from accel_data.request import Request, refuse_unserved
from accel_data.sample_count import CountingCollate


class DataLoaderDispatcher(PositionedLoader, DataLoader[Any]):
    """A `DataLoader` that only the first rank reads; it sends each rank its part of a global batch.

    The other ranks never touch the dataset. Any batch travels that can be pickled, and ranks may
    get batches of different shapes. Constructing it is a collective in a world larger than one, and
    so is each iteration: all ranks leave a loop over it after the same batch.

    Args:
        dataset: as of a `DataLoader`, which takes `kwargs`.
        split_batches: a batch is the global batch, and each rank gets an equal piece.
        skip_batches: how many batches each epoch leaves out at its beginning; behind
            `load_state_dict`, the rest of one leaves out nothing more.
        _drop_last: leaves out an incomplete last global batch, as `drop_last` does.
        slice_fn: `slice_fn(batch, slice, process_index=…, num_processes=…)` cuts the part of one
            process out of a global batch; None: `slice_tensors`, and lists with an object per row.
    """

    _accel_source: DispatchSource

    def __init__(
        self,
        dataset: Any,
        split_batches: bool = False,
        skip_batches: int = 0,
        _drop_last: bool = False,
        slice_fn: Callable[..., Any] | None = None,
        **kwargs: Any,
    ) -> None:
        dress_made(self, DataLoaderDispatcher)
        super().__init__(dataset, **kwargs)
        check_skipped("DataLoaderDispatcher(skip_batches", skip_batches)
        world = World.current()
        request = Request.alone(world.device, ()).to_dispatch(Shard(world.rank, world.size), split_batches, slice_fn)
        refuse_unserved("DataLoaderDispatcher()", self, request.shard)
        self.__dict__.update(dispatching(as_plain(self), request))
        self._accel_source.sharing.drop_last |= _drop_last
        self._accel_source.skipped = skip_batches

    def __iter__(self) -> Any:
        return self._accel_source.iterate(self._accel_outlet)


def dispatching(loader: DataLoader[Any], request: Request) -> dict[str, Any]:
    """The attributes by which a copy of `loader` becomes a `DataLoaderDispatcher`."""
    place = _place(request)
    if place != request.shard:
        raise ValueError(
            f"dispatch_batches=True sends batches from the first process to the others, but part {request.shard.index} of "
            f"{request.shard.count} was asked for, and this is process {place.index} of {place.count}. Leave num_processes and "
            f"process_index out, or use dispatch_batches=False."
        )
    counting: dict[str, Any] = {}
    if isinstance(loader.dataset, IterableDataset) and loader.batch_sampler is not None:
        counting["collate_fn"] = CountingCollate(loader.collate_fn)
    local = overridden_copy(loader, DataLoaderShard, **reading_part(loader, request.to_read()), **counting)
    assert isinstance(local, DataLoaderShard)
    source = DispatchSource(local, request)
    return {"_accel_outlet": request.outlet(), "_accel_source": source}


def _place(request: Request) -> Shard:
    """The index of this process among those that share a global batch, and their number."""
    world = World.current()
    if world.size == 1:
        return Shard(0, 1)
    channel = world.channel(request.group)
    return Shard(channel.rank, channel.size)
