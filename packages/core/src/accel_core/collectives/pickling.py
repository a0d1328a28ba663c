"""Pickling of Python objects that ranks send each other."""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch

from accel_core.processes.channel import to_bytes

EVERYWHERE = ("accel_core", "builtins", "collections", "copyreg", "torch")
"""Packages that are the same on every rank: what consists of their classes alone unpickles on all ranks, or on none."""


class _Pickler(pickle.Pickler):
    """Puts tensors on the CPU first: a device's index means another device to another rank.

    Attributes:
        unsure: whether it has met a class or function that another rank may lack.
    """

    unsure = False

    def reducer_override(self, obj: Any) -> Any:
        """Is asked about every object that is not of a simple built-in type, and about every class and function."""
        module = str(getattr(obj, "__module__", None) or type(obj).__module__)
        if module.partition(".")[0] not in EVERYWHERE:
            self.unsure = True
        if not isinstance(obj, torch.Tensor):
            return NotImplemented
        if type(obj) is torch.Tensor and obj.layout is torch.strided and not (obj.dtype in _TYPED or obj.is_quantized):
            held = obj.detach().cpu().contiguous()
            return _from_bytes, (held.view(-1).view(torch.uint8), obj.dtype, tuple(obj.shape), obj.requires_grad)
        return NotImplemented if obj.device.type == "cpu" else obj.detach().cpu().__reduce_ex__(pickle.HIGHEST_PROTOCOL)


_TYPED = {
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
}
"""Of other dtypes, such as float8, torch writes pickles that it cannot read."""


def _from_bytes(content: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...], requires_grad: bool) -> torch.Tensor:
    return content.view(dtype).view(shape).requires_grad_(requires_grad)


def pickled(obj: Any) -> tuple[bytearray, bool]:
    """The pickle of an object, and whether another rank may fail to read it. Raises whatever its methods raise."""
    stream = io.BytesIO()
    pickler = _Pickler(stream, pickle.HIGHEST_PROTOCOL)
    pickler.dump(obj)
    return bytearray(stream.getbuffer()), pickler.unsure


def unpickled(call: str, source: int, content: torch.Tensor) -> Any:
    """The object in a tensor of bytes.

    Raises:
        UnpicklingError: with the reason, `call` and the rank that sent it.
    """
    try:
        return pickle.loads(to_bytes(content))  # noqa: S301  (from another rank's memory, never from a file)
    except Exception as error:
        raise pickle.UnpicklingError(
            f"{call}: what rank {source} sent cannot be unpickled here: {type(error).__name__}: {error}. Send plain "
            f"data and tensors, or objects of a class that stands in a module which every rank can import."
        ) from error
