"""From a user's loader to a prepared one: which kind it becomes, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader, IterableDataset

from accel_core import Feed, Shard, World
from accel_core.api.component import agree_seed
from accel_core.api.loader import as_data_loader, overridden_copy
from accel_data.configuration import DataLoaderConfiguration
from accel_data.dispatcher import DataLoaderDispatcher, dispatching
from accel_data.loader import DataLoaderShard, reading_part
from accel_data.request import Request, named, refuse_unserved
from accel_data.sharded_stream import sharing_stream
from accel_data.worker_streams import refuse_datapipe

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

    A collective in a world larger than one, which agrees on the seed of the run.

    Args:
        dataloader: the loader, or an iterable of batches that has `state_dict` and
            `load_state_dict`.
        device: where batches are put, if `put_on_device`; None: the device of this process.
        num_processes: among how many processes the data is shared out; None: all of the world.
        process_index: which of them this is; None: the rank.
        split_batches, dispatch_batches, even_batches, use_seedable_sampler, data_seed,
        non_blocking,
            use_stateful_dataloader, presharded, uneven: see `DataLoaderConfiguration`.
        put_on_device: whether batches are put on the device.
        rng_types: which random streams are made equal to those of rank 0 when an iteration begins:
            "torch", "cuda", "xla", "generator"; None: "generator".
        slice_fn_for_dispatch: cuts the part of one process out of a global batch that is
            dispatched; None: `slice_tensors`.
        classes: see `Sharded.classes`.

    Raises:
        ValueError: if the data cannot be shared out like that.
    """
    world = World.current()
    options = DataLoaderConfiguration(
        split_batches=split_batches,
        dispatch_batches=dispatch_batches,
        even_batches=even_batches,
        use_seedable_sampler=use_seedable_sampler,
        data_seed=data_seed,
        non_blocking=non_blocking,
        use_stateful_dataloader=use_stateful_dataloader,
        presharded=presharded,
        uneven=uneven,
    )
    count = world.size if num_processes is None else num_processes
    index = world.rank if process_index is None else process_index
    request = Request(
        shard=Shard(index, count),
        feed=Feed(),
        device=(device or world.device) if put_on_device else None,
        seed=agree_seed(world, data_seed),
        number=0,
        group=None,
        slice_fn=slice_fn_for_dispatch,
        options=options,
        rng_types=named(rng_types),
        classes=classes,
    )
    return prepare(as_data_loader(dataloader), request)


def prepare(loader: DataLoader[Any], request: Request) -> DataLoader[Any]:
    """The prepared copy of a loader."""
    reading, sent = request.classes or (DataLoaderShard, DataLoaderDispatcher)
    if request.shard.count > 1:
        refuse_unserved("prepare()", loader, request.shard, request.options.presharded)
        refuse_datapipe(loader)
        iterable = isinstance(loader.dataset, IterableDataset)
        dispatched = request.options.dispatch_batches
        if (iterable and not request.options.presharded) if dispatched is None else dispatched:
            return overridden_copy(loader, sent, **dispatching(loader, request))
        if iterable:
            return overridden_copy(loader, reading, **sharing_stream(loader, request))
    return overridden_copy(loader, reading, **reading_part(loader, request))
