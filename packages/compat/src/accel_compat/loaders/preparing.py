"""Functions that make loaders without an Accelerator."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

import accel_data
from accel_compat.loaders.prepared import CLASSES, SkipBatchSampler
from accel_compat.loaders.stateful import as_stateful, reading


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
    torch_device_mesh: Any = None,
) -> DataLoader[Any]:
    """A copy of a loader that reads the part of one process: see `accel_data.prepare_data_loader`.

    `torch_device_mesh`: its dimensions for data say how many parts there are; others read the same part.
    """
    if torch_device_mesh is not None and num_processes is None and process_index is None:
        num_processes, process_index = _data_part(torch_device_mesh)
    prepared = accel_data.prepare_data_loader(
        as_stateful(dataloader) if use_stateful_dataloader else dataloader,
        device,
        num_processes,
        process_index,
        split_batches,
        put_on_device,
        rng_types,
        dispatch_batches,
        even_batches,
        slice_fn_for_dispatch,
        use_seedable_sampler,
        data_seed,
        non_blocking,
        classes=CLASSES,
    )
    prepared.use_stateful_dataloader = use_stateful_dataloader
    return prepared


def _data_part(mesh: Any) -> tuple[int, int]:
    """How many parts a mesh shares data out to, and which one is that of this process."""
    count, index = 1, 0
    for name in mesh.mesh_dim_names or ():
        if name.startswith("dp"):
            size = mesh[name].size()
            count, index = count * size, index * size + mesh.get_local_rank(name)
    return count, index


def skip_first_batches(dataloader: DataLoader[Any], num_batches: int = 0) -> DataLoader[Any]:
    """A loader that leaves out the first batches of each iteration: see `accel_data.skip_first_batches`.

    Of torch's own class with indices it is another one, which may be prepared.
    """
    if type(dataloader) is not DataLoader or isinstance(dataloader.dataset, IterableDataset):
        return accel_data.skip_first_batches(dataloader, num_batches)
    if dataloader.batch_sampler is None:
        return accel_data.skip_first_batches(dataloader, num_batches)
    return reading(dataloader, DataLoader, batch_sampler=SkipBatchSampler(dataloader.batch_sampler, num_batches))
