"""The waits of a piece of code for its device: an asynchronous device stands idle after each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

_READS = {  # operators that return to Python, or size their result by, what the device has computed
    "_local_scalar_dense", "_unique2", "bincount", "equal", "is_nonzero", "masked_select", "nonzero", "repeat_interleave",
    "unique_consecutive", "unique_dim",
}  # fmt: skip
_COPIES = {"_to_copy", "copy_"}
_SELECTS = {"index", "index_put", "index_put_", "_index_put_impl_"}  # by a mask they look for what is true first


class Waits(TorchDispatchMode):
    """Records the operators in its block for which the host waits for a device, by name.

    Copies between host and device wait unless `non_blocking`. Also of what a backward calls.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs the operator, and records it if it waits."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func.namespace == "aten" and self._waits(func, args, kwargs, result):
            self.names.append(func.overloadpacket.__name__)
        return result

    def _waits(self, func: Any, args: Any, kwargs: Any, result: Any) -> bool:
        name = func.overloadpacket.__name__
        given = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        on_device = [tensor for tensor in given if tensor.device.type not in ("cpu", "meta")]
        if name in _COPIES:
            source = given[-1]
            blocking = not (kwargs.get("non_blocking") or (name == "copy_" and len(args) > 2 and args[2]))
            return blocking and (source.device.type == "cpu") != (result.device.type == "cpu")
        if name in _SELECTS:
            return bool(on_device) and any(tensor.dtype in (torch.bool, torch.uint8) for tensor in given[1:])
        if name == "where":  # a number of the host is copied, and awaited
            return bool(on_device) and len(on_device) < len(given)
        return name in _READS and bool(on_device)


class _Made(TorchFunctionMode):
    """Records tensors that are made of Python's numbers on a device: a copy below all operators."""

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self._names = names

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func in (torch.tensor, torch.as_tensor) and not (made.is_cpu or isinstance(args[0], torch.Tensor)):
            self._names.append("tensor")
        return made


@contextmanager
def count_waits(own: Callable[[], Mapping[str, int]] | None = None) -> Iterator[list[str]]:
    """Gives a list that holds, after the block, the name of each wait for a device inside of it.

    `own` is the counter of a device that has one, by name: what it has counted in the block is
    listed instead, which misses nothing, in whatever thread.
    """
    found: list[str] = []
    before: Counter[str] = Counter() if own is None else Counter(own())
    with Waits() as waits, _Made(waits.names):
        yield found
    found += waits.names if own is None else (Counter(own()) - before).elements()
