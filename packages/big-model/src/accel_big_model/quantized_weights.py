"""Quantised weights in a folder: written in their plain parts, and put together again when they are read."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from accel_big_model.weights import INDEX, OffloadedWeightsLoader, lent, offload_weight, save_offload_index


class _Form(NamedTuple):
    """What makes a tensor of its parts."""

    kind: Any
    context: Any
    shape: torch.Size
    stride: tuple[int, ...]


class QuantizedWeights(Mapping[str, torch.Tensor]):
    """A store of weights that adds quantised ones, tensor subclasses of torchao, to those of another store.

    Their parts are written to a folder, which is for one model: one with an index is refused.
    """

    def __init__(self, others: Mapping[str, torch.Tensor], folder: str | os.PathLike[str]) -> None:
        self._others, self._folder = others, Path(folder)
        self._forms: dict[str, _Form] = {}
        self._parts: dict[str, list[str]] = {}
        self._index: dict[str, dict[str, Any]] = {}
        self._loader: OffloadedWeightsLoader | None = None
        if (self._folder / INDEX).is_file():
            raise ValueError(
                f"offload_folder={str(folder)!r} has weights already, and quantised ones are written anew: pass an empty folder."
            )
        self._folder.mkdir(parents=True, exist_ok=True)

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Writes a weight to the folder. ValueError if it is not made of plain tensors."""
        value: Any = tensor.detach()
        parts, context = value.__tensor_flatten__() if hasattr(value, "__tensor_flatten__") else ([], None)
        if not parts or any(type(getattr(value, part)) is not torch.Tensor for part in parts):
            raise ValueError(
                f"{name} was quantised to a {type(value).__name__}, which is not made of plain tensors and cannot be offloaded. Leave "
                f"offload_folder= out: then what is on 'disk' is not quantised."
            )
        for part in parts:
            offload_weight(getattr(value, part), f"{name}.{part}", self._folder, self._index)
        self._parts[name], self._forms[name] = parts, _Form(type(value), context, value.shape, value.stride())

    def close(self) -> None:
        """Everything has been added."""
        save_offload_index(self._index, self._folder)
        self._loader = OffloadedWeightsLoader(save_folder=self._folder) if self._index else None

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self._forms or self._loader is None:
            return self._others[name]
        return self._made(name, {part: self._loader[f"{name}.{part}"] for part in self._parts[name]})

    def lend(self, name: str) -> torch.Tensor:
        """As `weights[name]`, in memory that is used again."""
        if name not in self._forms or self._loader is None:
            return lent(self._others, name)
        return self._made(name, {part: self._loader.lend(f"{name}.{part}") for part in self._parts[name]})

    def _made(self, name: str, parts: dict[str, torch.Tensor]) -> torch.Tensor:
        form = self._forms[name]
        made: torch.Tensor = form.kind.__tensor_unflatten__(parts, form.context, form.shape, form.stride)
        return made

    def __contains__(self, name: object) -> bool:
        return name in self._others

    def __iter__(self) -> Iterator[str]:
        return iter(self._others)

    def __len__(self) -> int:
        return len(self._others)


def without_weight(linear: nn.Linear) -> None:
    """Puts a weight without memory into a layer, where that of the store comes for each call."""
    empty = torch.empty(linear.weight.shape, dtype=linear.weight.dtype, device="meta")
    linear.weight = nn.Parameter(empty, requires_grad=False)
