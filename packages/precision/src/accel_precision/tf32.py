"""TensorFloat-32: full precision, with matrix products in 19 bits where the device has units for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar
from weakref import WeakSet

import torch

from accel_core import Precision, World, hookimpl


class TF32(Precision):
    """Everything in float32, but for faster matrix products of rounded numbers.

    Their factors are rounded to 10 bits after the point, and keep the range of float32. Sets
    `torch.set_float32_matmul_precision("high")`, which holds for the whole process, until the last
    Accelerator with it ends its training. Where a device has no TF32, products are in float32, and
    `explain()` says so. Convolutions use it without being asked: see `torch.backends.cudnn.conv`.
    """

    _in_use: ClassVar[WeakSet[TF32]] = WeakSet()
    _before: ClassVar[str] = "highest"
    _device: torch.device | None = None

    @hookimpl
    def start(self, world: World) -> None:
        """Tells torch, and remembers what it was told before."""
        if not TF32._in_use:
            TF32._before = _told()
        self._device = world.device
        TF32._in_use.add(self)
        torch.set_float32_matmul_precision("high")

    @hookimpl
    def finish(self) -> None:
        """Takes it back, unless another Accelerator trains in it."""
        TF32._in_use.discard(self)
        if not TF32._in_use:
            torch.set_float32_matmul_precision(TF32._before)

    def details(self) -> Mapping[str, str]:
        """What products are computed in, on this device."""
        products = "TF32" if self._device is not None and has_tf32(self._device) else "float32: the device has no TF32"
        return {"policy": f"float32, matrix products in {products}"}


def has_tf32(device: torch.device) -> bool:
    """Whether a device multiplies in TF32 when told to, as its module in torch says."""
    says = getattr(torch.get_device_module(device), "is_tf32_supported", None)
    return bool(says is not None and says())


def _told() -> str:
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # torch's two ways to set it were mixed: then it knows no answer
        return "highest"
