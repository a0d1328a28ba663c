"""Gives torch a device named `toy`, with two of them in the memory of this machine. Importing this is all it takes.

    import torch
    import accel_toydevice

    torch.accelerator.current_accelerator()   # device(type='toy')
    torch.ones(2, device="toy:1")

Tensors live in host memory, and operators run on the CPU, so nothing here is fast: it is for code that must work on a device
that it has never heard of. The import has effects by intention, as that of any device has: torch can hold one such device
per process, and asks it for its name once.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from accel_toydevice import native, runtime

__all__ = ["runtime"]


def _make_backend(store: dist.Store, rank: int, size: int, timeout: object) -> object:
    """The collectives of this device: those of gloo, on the same memory."""
    return native.over(dist.ProcessGroupGloo(store, rank, size, timeout=timeout))


torch.utils.rename_privateuse1_backend("toy")
torch._register_device_module("toy", runtime)  # how torch lets a device in, under an underscore or not
torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
dist.Backend.register_backend("toyccl", _make_backend, devices=["toy"])
