"""Peak rates of devices: floating-point operations per second of dense matrix products.

The figures are those of the makers.

Of devices that come in several forms (boards, slots, halves of a package) only those stand here
whose name, as torch reports it, tells which one it is. A multiplication and an addition are two
operations. Where a data sheet counts the zeros of structured sparsity as computed, half of its
figure stands here; where it distinguishes the type of the sum, the figure is that of sums in
float32.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from types import MappingProxyType

import torch

_UNSPOKEN = re.compile(r"nvidia|amd|tesla|instinct|geforce|generation|\d+gb|hbm\d\w*|sxm\d?|oam", re.IGNORECASE)
"""Words of a device's name that say nothing of its speed: makers, families, memory, and the form that the table means anyway."""


def _teraflops(
    bfloat16: float | None = None,
    float16: float | None = None,
    float8: float | None = None,
    tf32: float | None = None,
    float32: float | None = None,
) -> Mapping[str, float]:
    given = {"bfloat16": bfloat16, "float16": float16, "float8": float8, "tf32": tf32, "float32": float32}
    return MappingProxyType({name: value * 1e12 for name, value in given.items() if value is not None})


_A100 = _teraflops(312, 312, None, 156, 19.5)
_H100 = _teraflops(989.4, 989.4, 1978.9, 494.7, 66.9)
_H100_NVL = _teraflops(835.5, 835.5, 1670.5, 417.5, 60)
_MI300X = _teraflops(1307.4, 1307.4, 2614.9, 653.7, 163.4)

PEAKS: Mapping[str, Mapping[str, float]] = MappingProxyType(
    {
        # NVIDIA: V100 data sheet (2020), T4 data sheet (2019).
        "v100": _teraflops(float16=125, float32=15.7),
        "v100 pcie": _teraflops(float16=112, float32=14),
        "v100s pcie": _teraflops(float16=130, float32=16.4),
        "t4": _teraflops(float16=65, float32=8.1),
        # NVIDIA: data sheets of A100 (2022), A30 (2022), A40 (2022), A10 (2021).
        "a100": _A100,
        "a100 pcie": _A100,
        "a30": _teraflops(165, 165, None, 82, 10.3),
        "a40": _teraflops(149.7, 149.7, None, 74.8, 37.4),
        "a10": _teraflops(125, 125, None, 62.5, 31.2),
        "a10g": _teraflops(70, 70),
        # NVIDIA: data sheets of RTX A6000 (2021), RTX 6000 Ada (2023) and H20 (2024), in the dtypes that were checked.
        "rtx a6000": _teraflops(154.8, 154.8),
        "rtx 6000 ada": _teraflops(364.2, 364.2),
        "h20": _teraflops(148, 148),
        # NVIDIA: data sheets of L4, L40 and L40S (2023).
        "l4": _teraflops(121, 121, 242.5, 60, 30.3),
        "l40": _teraflops(181.05, 181.05, 362, 90.5, 90.5),
        "l40s": _teraflops(362.05, 362.05, 733, 183, 91.6),
        # NVIDIA: H100 architecture paper (2022), data sheets of H100 (2024), H200 (2024) and GH200 (2024).
        "h100": _H100,
        "h100 pcie": _teraflops(756, 756, 1513, 378, 51),
        "h100 nvl": _H100_NVL,
        "h200": _H100,
        "h200 nvl": _H100_NVL,
        "gh200": _H100,
        # NVIDIA: Blackwell architecture brief (2024): HGX B200 at 1000 W, GB200. Those of B300 depend on its power: 2250 to 2500.
        "b200": _teraflops(2250, 2250, 4500, 1100, 80),
        "gb200": _teraflops(2500, 2500, 5000, 1250, 80),
        # NVIDIA: architecture papers GA102 (2021), Ada (2023) and RTX Blackwell (2025).
        "rtx 3090": _teraflops(71, 71, None, 35.6, 35.6),
        "rtx 4090": _teraflops(165.2, 165.2, 330.3, 82.6, 82.6),
        "rtx 5090": _teraflops(209.5, 209.5, 419, 104.8, 104.8),
        # AMD: data sheets of MI210 (2022), MI300X (2023), MI325X (2024), MI350X and MI355X (2025). Those of the MI250 are of two
        # devices in torch's sense.
        "mi210": _teraflops(181, 181, None, None, 45.3),
        "mi300a": _teraflops(980.6, 980.6),
        "mi300x": _MI300X,
        "mi325x": _MI300X,
        "mi350x": _teraflops(2306.9, 2306.9, 4613.7, None, 144.2),
        "mi355x": _teraflops(2516.6, 2516.6, 5033.2, None, 157.3),
    }
)
"""Device → dtype of the factors → operations per second. The device goes by the telling words of its name, in small letters."""

_NARROW = MappingProxyType({"bf16": "bfloat16", "fp16": "float16", "fp8": "float8", "mxfp8": "float8"})
_DTYPES = MappingProxyType({"no": "float32", "fp32": "float32", "tf32": "float32", **_NARROW})


def peak_flops(device: torch.device, mixed_precision: str) -> float | None:
    """The peak rate of a device in a precision, in operations per second; None, and a warning, if unknown.

    "no" is float32, or TF32 where torch is told to use it for matrix products, as "tf32" tells it.
    """
    name = device_name(device)
    known = PEAKS.get(telling_words(name))
    if known is None:
        _warn_of(f"of {name!r} is not known")
        return None
    dtype = _DTYPES.get(mixed_precision.removesuffix("-true"), "")
    if dtype == "float32" and "tf32" in known and torch.backends.cuda.matmul.fp32_precision == "tf32":
        dtype = "tf32"
    if dtype not in known:
        _warn_of(f"of {name!r} in the precision {mixed_precision!r} is not known; known is {', '.join(known)}")
        return None
    return known[dtype]


def device_name(device: torch.device) -> str:
    """The name of a device in torch ("NVIDIA A100-SXM4-80GB"), or its type if there is none."""
    describe = getattr(torch.get_device_module(device), "get_device_name", None)
    return device.type if describe is None else str(describe(device))


def telling_words(name: str) -> str:
    """The words of a device's name in `PEAKS`: "NVIDIA A100 80GB PCIe" is "a100 pcie"."""
    return " ".join(word.lower() for word in re.findall(r"\w+", name) if not _UNSPOKEN.fullmatch(word))


def _warn_of(what: str) -> None:
    given = f"flops_per_sample was given, and the peak {what}, so that mfu is left out."
    warnings.warn(
        f"{given} Give it, in operations per second of one device: Throughput(..., peak_flops=312e12).", stacklevel=4
    )
