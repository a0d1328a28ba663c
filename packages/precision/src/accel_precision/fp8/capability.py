"""The hardware that multiplies in eight bits, as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Need:
    """The capability that a device must have.

    Args:
        products: what is computed, in words.
        cuda: the smallest compute capability of NVIDIA's devices.
        hip: beginnings of the names of AMD's architectures; none: none is known to be capable.
    """

    products: str
    cuda: tuple[int, int]
    hip: tuple[str, ...]


FP8_PRODUCTS = Need("matrix products in fp8", (8, 9), ("gfx942", "gfx950", "gfx12"))
"""Of `torch._scaled_mm`: Ada, Hopper and later; MI300, MI350 and RDNA4."""

MXFP8_PRODUCTS = Need("matrix products in MXFP8", (10, 0), ())
"""Of torchao's kernels: Blackwell."""


@dataclass(frozen=True)
class Found:
    """Properties of a device: its type, and its compute capability or architecture."""

    device_type: str
    capability: tuple[int, int] | None = None
    architecture: str | None = None

    def __str__(self) -> str:
        if self.architecture is not None:
            return f"{self.device_type} device of the architecture {self.architecture}"
        if self.capability is not None:
            return f"{self.device_type} device of compute capability {'.'.join(map(str, self.capability))}"
        return f"{self.device_type} device"


def find(device: torch.device) -> Found:
    """Asks a device."""
    if device.type != "cuda":
        return Found(device.type)
    if torch.version.hip:
        return Found("cuda", architecture=torch.cuda.get_device_properties(device).gcnArchName)
    return Found("cuda", torch.cuda.get_device_capability(device))


def emulates(asked: bool | None, found: Found, need: Need, remedies: Mapping[str, str]) -> bool:
    """Whether products are emulated: as asked, and where nothing was asked, on a CPU only.

    Args:
        asked: True emulates anywhere; False never does; None: see above.
        found: the device.
        need: what real products take.
        remedies: what to type instead, by what it does.

    Raises:
        ValueError: for a device that is not capable, naming what it is and what to do. On a kind of
            device of which nothing is known here, only if nothing was asked: with `False` the user
            knows better.
    """
    if asked or (asked is None and found.device_type == "cpu"):
        return True
    if found.device_type == "cuda":
        capable = (
            bool(need.hip) and found.architecture.startswith(need.hip)
            if found.architecture is not None
            else found.capability is not None and found.capability >= need.cuda
        )
    else:
        capable = asked is False
    if not capable:
        hip = f", or AMD's {', '.join(need.hip)}" if need.hip else ""
        offered = "; ".join(f"{code} {effect}" for effect, code in remedies.items())
        raise ValueError(
            f"{need.products[:1].upper()}{need.products[1:]} were asked for, and this is a {found}; they need compute capability "
            f"{'.'.join(map(str, need.cuda))} or more{hip}. Use {offered}."
        )
    return False
