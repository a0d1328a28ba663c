"""Precisions for accel-core: which dtype is used where, and what it takes to train in it.

    Accelerator(mixed_precision="bf16")             # or "fp16", "bf16-true", "fp16-true", "tf32", "fp8", "mxfp8"
    Accelerator(mixed_precision=FP16(init_scale=1024.0))

amp            bf16 and fp16 by autocast, and pure low precision
tf32           full precision with faster matrix products
scaling        dynamic loss scaling
fp8/           matrix products in 8 bits, by torchao or Transformer Engine
mx             microscaling formats: 8 bits with a scale per block
capability     what a device has to be able to do
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from accel_precision.amp import BF16, FP16, BF16True, FP16True
    from accel_precision.fp8.component import FP8
    from accel_precision.fp8.gathered import plain_weight
    from accel_precision.fp8.recipes import AORecipeKwargs, FP8RecipeKwargs, TERecipeKwargs
    from accel_precision.handlers import GradScalerKwargs
    from accel_precision.mx import MXFP8
    from accel_precision.tf32 import TF32

__all__ = [
    "BF16",
    "FP8",
    "FP16",
    "MXFP8",
    "TF32",
    "AORecipeKwargs",
    "BF16True",
    "FP8RecipeKwargs",
    "FP16True",
    "GradScalerKwargs",
    "TERecipeKwargs",
    "plain_weight",
]

__version__ = "0.1.0"

# Looked up when they are used: only the precision that is chosen is imported.
_MODULES = {
    "AORecipeKwargs": "fp8.recipes",
    "BF16": "amp",
    "BF16True": "amp",
    "FP16": "amp",
    "FP16True": "amp",
    "FP8": "fp8.component",
    "FP8RecipeKwargs": "fp8.recipes",
    "GradScalerKwargs": "handlers",
    "MXFP8": "mx",
    "TERecipeKwargs": "fp8.recipes",
    "TF32": "tf32",
    "plain_weight": "fp8.gathered",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    return found
