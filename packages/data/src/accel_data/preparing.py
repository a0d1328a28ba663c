"""From a user's loader to a prepared one, or one that leaves out its first batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader, IterableDataset

from accel_core import Feed, Shard, World
from accel_core.api.component import agree_seed
from accel_core.api.loader import PreparedLoader, as_data_loader, overridden_copy
from accel_data.configuration import DataLoaderConfiguration
from accel_data.dispatcher import DataLoaderDispatcher, dispatching
from accel_data.loader import DataLoaderShard, reading_part
from accel_data.request import Request, named, refuse_unserved
from accel_data.sharded_stream import sharing_stream

if TYPE_CHECKING:
    import torch

    from accel_data.configuration import Uneven


def prepare_data_loader(
    dataloader: DataLoader[Any],
    device: torch.device | None = None,
    num_processes: int | None = None,
    process_index: int | None = None,
    split_batches: bool = False,
    put_on_device: bool = False,
    rng_types: Iterable[str] | None = None,
    dispatch_batches: bool | None = None,
    even_batches: bool = True,
    slice_fn_for_dispatch: Callable[..., Any] | None = None,
    use_seedable_sampler: bool = False,
    data_seed: int | None = None,
    non_blocking: bool = False,
    use_stateful_dataloader: bool = False,
    presharded: bool = False,
    uneven: Uneven = "pad",
    *,
    classes: tuple[type[Any], type[Any]] | None = None,
) -> DataLoader[Any]:
    """A copy of a loader that reads the part of one process. Needs no Accelerator.

    A collective in a world larger than one, which agrees on the seed of the run. Raises ValueError
    if the data cannot be shared out like that.

    Args:
        dataloader: or an iterable of batches that has `state_dict` and `load_state_dict`.
        device: where batches are put, if `put_on_device`; None: the device of this process.
        num_processes: that share the data; None: all of the world.
        process_index: which of them this is; None: the rank.
        rng_types: which random streams are made equal to those of rank 0 when an iteration begins:
            "torch", the type of the device, such as "cuda", "generator"; None: "generator".
        slice_fn_for_dispatch: cuts the part of one process out of a global batch that is
            dispatched; None: `slice_tensors`.
        uneven: as the others, see `DataLoaderConfiguration`.
        classes: see `Sharded.classes`.
    """
    given, world = locals(), World.current()
    options = DataLoaderConfiguration(**{field.name: given[field.name] for field in fields(DataLoaderConfiguration)})
    count = world.size if num_processes is None else num_processes
    shard = Shard(world.rank if process_index is None else process_index, count)
    device = (device or world.device) if put_on_device else None
    seed, slice_fn = agree_seed(world, data_seed), slice_fn_for_dispatch
    request = Request(shard, Feed(), device, seed, 0, None, slice_fn, options, named(rng_types), classes)
    return prepare(as_data_loader(dataloader), request)


def prepare(loader: DataLoader[Any], request: Request) -> DataLoader[Any]:
    """The prepared copy of a loader."""
    reading, sent = request.classes or (DataLoaderShard, DataLoaderDispatcher)
    if request.shard.count > 1:
        refuse_unserved("prepare()", loader, request.shard, request.options.presharded)
        iterable = isinstance(loader.dataset, IterableDataset)
        dispatched = request.options.dispatch_batches
        if (iterable and not request.options.presharded) if dispatched is None else dispatched:
            return overridden_copy(loader, sent, **dispatching(loader, request))
        if iterable:
            return overridden_copy(loader, reading, **sharing_stream(loader, request))
    return overridden_copy(loader, reading, **reading_part(loader, request))


def skip_first_batches(dataloader: DataLoader[Any], num_batches: int = 0) -> DataLoader[Any]:
    """A loader that leaves out the first batches of each iteration, unread where they have indices.

    Of a prepared loader it is a copy that shares its epochs: loop over it for the rest of an epoch,
    and over the loader itself from then on. Batches of this rank are counted from the beginning of
    the epoch, also behind `load_state_dict`: as many as were done lead where the loader goes on by
    itself, and the loaded position is used up. 0 leaves out nothing, so the loaded position holds.
    Of any other loader, the result reads all of it in this process, in an order that is a function
    of seed and epoch; that is a collective in a world larger than one, which agrees on the seed.

    Raises:
        TypeError: if it is no `DataLoader`.
        ValueError: if the number is negative, or no whole number. When iterated: if a dataset that
            keeps a position of its own would have to go back from the one that was loaded.
    """
    if isinstance(dataloader, PreparedLoader):
        return dataloader.behind(num_batches)
    if not isinstance(dataloader, DataLoader):
        raise TypeError(
            f"skip_first_batches() was given a {type(dataloader).__name__}, expected a torch.utils.data.DataLoader. Of other "
            f"iterables, itertools.islice(batches, {num_batches!r}, None) leaves out the first."
        )
    twin = overridden_copy(dataloader, DataLoaderShard, **reading_part(dataloader, Request.alone(None, None)))
    assert isinstance(twin, DataLoaderShard)
    return twin.behind(num_batches)
