"""From an index batch to a batch, as torch's default does it, without its detours.

torch's collation walks any structure. Most samples are flat dicts or tuples of tensors, which can be stacked directly, and
the rows of a `TensorDataset` can be indexed at once. What this gives is what torch gives, bit for bit; whatever is not
plainly of these shapes is left to torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import TensorDataset, default_collate
from torch.utils.data._utils.collate import collate_tensor_fn, default_collate_fn_map


def fetching(dataset: Any) -> Callable[[list[int]], Any]:
    """A function from an index batch to the batch that `default_collate` would make of the samples of `dataset`.

    Valid for one iteration: the dataset and torch's table of collations are looked at once.
    """
    collate = _stacked if _collates_plainly() else default_collate
    if getattr(dataset, "__getitems__", None):
        return lambda indices: collate(dataset.__getitems__(indices))

    def fetch(indices: list[int]) -> Any:
        return collate([dataset[index] for index in indices])

    if type(dataset) is TensorDataset and all(map(_is_indexed_plainly, dataset.tensors)) and collate is _stacked:
        return lambda indices: _rows_at(dataset.tensors, indices, fetch)
    return fetch


def _collates_plainly() -> bool:
    """Whether torch's collation of tensors in dicts and tuples is as it was shipped; its table is open to the user."""
    table = default_collate_fn_map
    return table.get(torch.Tensor) is collate_tensor_fn and not any(
        issubclass(kind, known) for kind in (dict, tuple) for known in table
    )


def _is_indexed_plainly(tensor: torch.Tensor) -> bool:
    """Whether `tensor[[i, j]]` is the stack of `tensor[i]` and `tensor[j]`, strides and autograd history included."""
    return (
        type(tensor) is torch.Tensor
        and tensor.layout is torch.strided
        and not (tensor.is_nested or tensor.is_quantized or tensor.is_conj() or tensor.is_neg() or tensor.requires_grad)
        and tensor.is_contiguous()
    )


def _rows_at(tensors: tuple[torch.Tensor, ...], indices: Any, fetch: Callable[[Any], Any]) -> Any:
    try:
        where = torch.tensor(indices)
        if where.dtype is torch.int64 and where.dim() == 1:
            return [tensor[where] for tensor in tensors]
    except (IndexError, RuntimeError, TypeError, ValueError):
        pass  # fetching sample by sample raises what the user expects to see
    return fetch(indices)


def _stacked(samples: Any) -> Any:
    """`default_collate(samples)`, without its detours for flat dicts and tuples of tensors, or tensors.

    Only the first sample is looked at, as torch does. What cannot be stacked, for whatever reason, is torch's to collate
    or to refuse.
    """
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
