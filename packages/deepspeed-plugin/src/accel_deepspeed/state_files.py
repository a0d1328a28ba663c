"""Tensors whose memory is files: where masters and optimizer state are kept on NVMe."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import torch


class StateFiles:
    """Puts tensors into memory-mapped files of a folder, which the system reads and writes itself.

    A file loses its name when it is mapped, so it goes with its tensor, however the process ends.

    Args:
        folder: is made with the first file.
    """

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)

    def zeros(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A new flat tensor. OSError if there is no room for all of it, or no right to write."""
        if not numel:
            return torch.zeros(0, dtype=dtype)
        self._folder.mkdir(parents=True, exist_ok=True)
        descriptor, path = tempfile.mkstemp(".state", dir=self._folder)
        try:
            os.posix_fallocate(descriptor, 0, numel * dtype.itemsize)  # else a full disk kills a later step
            return torch.from_file(path, shared=True, size=numel, dtype=dtype)
        finally:
            os.close(descriptor)
            os.unlink(path)

    def copy_of(self, value: torch.Tensor) -> torch.Tensor:
        """The content of a flat tensor of the host in a file; of another one the tensor itself."""
        if value.device.type != "cpu" or value.untyped_storage().filename is not None:
            return value
        return self.zeros(value.numel(), value.dtype).copy_(value.detach())
