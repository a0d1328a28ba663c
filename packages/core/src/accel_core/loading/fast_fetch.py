"""Batches from index batches, as of torch's default bit for bit, faster for plain samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import profiler
from torch.utils.data import DataLoader, IterableDataset, MapDataPipe, TensorDataset, default_collate
from torch.utils.data._utils.collate import collate_tensor_fn, default_collate_fn_map

from accel_core.base.nested import to_device

if TYPE_CHECKING:
    from accel_core.loading.index_source import SourceIteration
    from accel_core.loading.prepared_loader import Outlet


def fetches_plainly(loader: DataLoader[Any]) -> bool:
    """Whether torch's iterator would do nothing but fetch and collate."""
    return (
        type(loader).__bases__[-1] is DataLoader
        and loader.num_workers == 0
        and not loader.pin_memory
        and not loader.timeout
        and loader.batch_sampler is not None
        and loader.collate_fn is default_collate
        and not isinstance(loader.dataset, (IterableDataset, MapDataPipe))
    )


def plain_batches(dataset: Any, opening: SourceIteration, outlet: Outlet) -> Iterator[Any]:
    """The batches of one iteration, placed and reported."""
    fetch = fetching(dataset)
    device, non_blocking, place = outlet.device, outlet.non_blocking, outlet.feed.place_batch
    progress = opening.progress
    with outlet.passage() as passage:
        opening.start()
        advance = passage.advance
        for indices, remaining, rows, samples in opening.reads:
            if profiler._is_profiler_enabled:  # kept by torch as a plain flag for checks like this one
                with profiler.record_function("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"):
                    batch = fetch(indices)
            else:
                batch = fetch(indices)
            if place is not None:
                batch, rows = outlet.placed(batch, rows, remaining)
            elif device is not None:
                batch = to_device(batch, device, non_blocking)
            advance(remaining, rows, indices)
            progress.samples = samples
            yield batch
        progress.finished = True


def fetching(dataset: Any) -> Callable[[list[int]], Any]:
    """A function from an index batch to its batch by `default_collate`, for one iteration."""
    table = default_collate_fn_map  # which is open to the user
    known = any(issubclass(kind, entry) for kind in (dict, tuple) for entry in table)
    collate = _stacked if table.get(torch.Tensor) is collate_tensor_fn and not known else default_collate
    if getattr(dataset, "__getitems__", None):
        return lambda indices: collate(dataset.__getitems__(indices))

    def fetch(indices: list[int]) -> Any:
        return collate([dataset[index] for index in indices])

    if type(dataset) is TensorDataset and all(map(_is_indexed_plainly, dataset.tensors)) and collate is _stacked:
        return lambda indices: _rows_at(dataset.tensors, indices, fetch)
    return fetch


def _is_indexed_plainly(tensor: torch.Tensor) -> bool:
    """Whether `tensor[[i, j]]` equals the stack of its rows, with strides and autograd history."""
    if not _is_plain_tensor(tensor) or tensor.is_quantized or tensor.requires_grad:
        return False
    return tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())


def _rows_at(tensors: tuple[torch.Tensor, ...], indices: Any, fetch: Callable[[Any], Any]) -> Any:
    try:
        where = torch.tensor(indices)
        if where.dtype is torch.int64 and where.dim() == 1:
            return [tensor[where] for tensor in tensors]
    except (IndexError, RuntimeError, TypeError, ValueError):
        pass  # fetching sample by sample raises what the user expects to see
    return fetch(indices)


def _stacked(samples: Any) -> Any:
    """`default_collate(samples)`; stacks by the first sample's kind, else calls it."""
    if type(samples) is list and samples:
        first = samples[0]
        kind = type(first)
        try:
            if kind is dict and all(map(_is_plain_tensor, first.values())):
                return {key: torch.stack([sample[key] for sample in samples]) for key in first}
            if kind is tuple and all(map(_is_plain_tensor, first)):
                return [torch.stack(column) for column in zip(*samples, strict=True)]
        except (KeyError, RuntimeError, TypeError, ValueError):
            pass
    return default_collate(samples)


def _is_plain_tensor(value: Any) -> bool:
    return type(value) is torch.Tensor and value.layout is torch.strided and not value.is_nested
