"""Memory that runs out, and the batch size that fits into it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import accel_core

_MESSAGES = ("out of memory", "CUDNN_STATUS_NOT_SUPPORTED", "DefaultCPUAllocator: can't allocate memory")


def should_reduce_batch_size(exception: BaseException) -> bool:
    """Whether an error says that memory ran out."""
    if isinstance(exception, torch.OutOfMemoryError):
        return True
    return isinstance(exception, RuntimeError) and any(part in str(exception) for part in _MESSAGES)


def find_executable_batch_size(
    function: Callable[..., Any] | None = None,
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[..., int] | None = None,
) -> Callable[..., Any]:
    """`accel_core.find_executable_batch_size`; a first size of 0 is an error when the function is called."""
    if function is None:
        return lambda it: find_executable_batch_size(it, starting_batch_size, reduce_batch_size_fn)
    if starting_batch_size:
        return accel_core.find_executable_batch_size(function, starting_batch_size, reduce_batch_size_fn)

    def search(*_: Any, **__: Any) -> Any:
        raise RuntimeError("No executable batch size found, reached zero.")

    return search


def get_xpu_available_memory(device_index: int) -> int:
    """Bytes that are free on a device of Intel's."""
    return int(torch.xpu.mem_get_info(device_index)[0])
