"""A device for torch, named "toy": two devices in the memory of this machine. Importing this is all it takes.

    import torch
    import accel_toydevice

    torch.accelerator.current_accelerator()   # device(type='toy')
    torch.ones(2, device="toy:1")

It works as a real one does: what the host asks for goes into the queue of a stream, and the host goes on. Only the memory is
that of the host, and the operators are those of the CPU, so nothing here is fast: it is for code that must work on a device
that it has never heard of, and for finding what such code reads, frees or waits for at the wrong time. The import has effects
by intention, as that of any device has: torch can hold one such device per process, and asks it for its name once.
"""

from __future__ import annotations

import atexit

import torch
import torch.distributed as dist

from accel_toydevice import native, runtime

__all__ = ["runtime"]

FAREWELL = 2.0
"""Seconds that a process waits at its end for what is still queued."""


def _make_backend(store: dist.Store, rank: int, size: int, timeout: object) -> object:
    """The collectives of this device, over those of gloo."""
    return native.over(dist.ProcessGroupGloo(store, rank, size, timeout=timeout))


torch.utils.rename_privateuse1_backend("toy")
torch._register_device_module("toy", runtime)  # how torch lets a device in, under an underscore or not
torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
dist.Backend.register_backend("toyccl", _make_backend, devices=["toy"])
atexit.register(native.stop, FAREWELL)  # before the interpreter goes, which a kernel in Python needs
