"""Bytes of tensors that are alive while operations run, of tensors that have no memory too."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_SCALAR = torch.ops.aten._local_scalar_dense.default  # of `item()`


class LiveBytes(TorchDispatchMode):
    """A block in which every new storage is counted, once, until it is freed.

    It sees the results of torch's operations: nothing that a kernel allocates and frees by itself.

    Args:
        left_out: tensors whose storages are not counted.
        made_up: what `item()` of a tensor on the meta device gives; None: torch raises.

    Attributes:
        live: bytes at this moment.
        peak: bytes at most, since the beginning or `begin_again`.
    """

    def __init__(self, left_out: Iterable[torch.Tensor] = (), made_up: int | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = self.peak = 0
        self._made_up = made_up
        self._left_out = {id(storage): storage for storage in (each.untyped_storage() for each in left_out)}
        self._counted: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}

    def begin_again(self) -> None:
        """Makes the peak what is alive now."""
        self.peak = self.live

    def take_out(self, tensor: torch.Tensor) -> None:
        """Counts the storage of a tensor no longer."""
        _, size = self._counted.pop(id(tensor.untyped_storage()), (None, 0))
        self.live -= size

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._made_up is not None and func is _SCALAR and args[0].is_meta:
            return torch.empty((), dtype=args[0].dtype, device="cpu").fill_(self._made_up).item()
        result = func(*args, **(kwargs or {}))
        for each in tree_leaves(result):
            if isinstance(each, torch.Tensor):
                self._count(each.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = id(storage)
        if key in self._counted or key in self._left_out:
            return
        size = storage.nbytes()

        def freed(_: object) -> None:
            if self._counted.pop(key, None) is not None:
                self.live -= size

        self._counted[key] = weakref.ref(storage, freed), size
        self.live += size
        self.peak = max(self.peak, self.live)
