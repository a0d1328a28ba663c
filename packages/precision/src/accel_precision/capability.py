"""The hardware that can compute in each dtype, and the alternative to choose where it cannot.

Some devices emulate a dtype that they lack, several times slower than full precision, and without a
word. Here that is an error: the precision that was asked for would not be what runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Needs:
    """The requirements of a dtype on a CUDA device.

    Args:
        capability: the least compute capability.
        generation: the first devices that have it, in words.
        instead: what to choose on older ones, as the user types it.
    """

    capability: tuple[int, int]
    generation: str
    instead: str


CUDA: Mapping[torch.dtype, Needs] = {
    torch.float16: Needs((5, 3), "Maxwell of 2015", "mixed_precision='no'"),
    torch.bfloat16: Needs((8, 0), "Ampere", "mixed_precision='fp16' or 'no'"),
}
"""By dtype. From NVIDIA's tables of compute capabilities; what fp8 needs is in `accel_precision.fp8.capability`."""


def require(asked: str, dtype: torch.dtype, device: torch.device) -> None:
    """Raises `ValueError` unless the hardware computes in `dtype` by itself.

    Args:
        asked: what the user chose, as in messages: "BF16()".
        dtype: that of the matrix products.
        device: where they run. A CUDA device is asked for its compute capability; others what torch
            says of their kind.
    """
    lack = _lack_of_cuda(dtype, device) if device.type == "cuda" else _lack_of_kind(dtype, device.type)
    if lack is not None:
        found, instead = lack
        raise ValueError(
            f"{asked} computes in {_name(dtype)}, and {device} cannot: {found}. Choose {instead}, or another device."
        )


def shortfall(dtype: torch.dtype, capability: tuple[int, int]) -> str | None:
    """The reason why a CUDA device of this capability cannot compute in `dtype`; None if it can."""
    needs = CUDA.get(dtype)
    if needs is None or capability >= needs.capability:
        return None
    has, least = (".".join(map(str, version)) for version in (capability, needs.capability))
    return f"its compute capability is {has}, and {_name(dtype)} needs {least} ({needs.generation}) or newer"


def _lack_of_cuda(dtype: torch.dtype, device: torch.device) -> tuple[str, str] | None:
    if torch.version.hip is not None:
        return (
            None  # capabilities of AMD's devices count otherwise, and torch serves none that lacks float16 or bfloat16
        )
    found = shortfall(dtype, torch.cuda.get_device_capability(device))
    if found is None:
        return None
    return f"{torch.cuda.get_device_name(device)}: {found}", CUDA[dtype].instead


def _lack_of_kind(dtype: torch.dtype, device_type: str) -> tuple[str, str] | None:
    if not torch.amp.is_autocast_available(device_type):
        return f"torch has no mixed precision for devices of the type {device_type!r}", "mixed_precision='no'"
    if device_type == "mps" and dtype is torch.bfloat16 and not torch.backends.mps.is_macos_or_newer(14, 0):
        return "bfloat16 needs macOS 14 or newer", "mixed_precision='fp16' or 'no'"
    supported = getattr(torch.get_device_module(device_type), "get_amp_supported_dtype", None)
    if supported is not None and dtype not in supported():
        names = ", ".join(map(_name, supported()))
        return f"its backend computes in {names or 'no other dtype'}", "mixed_precision='no'"
    return None


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
