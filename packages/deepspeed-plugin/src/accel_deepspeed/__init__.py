"""ZeRO for accel-core over DeepSpeed: parameters, gradients and optimizer state are shared out among the processes.

    Accelerator(strategy="deepspeed")
    Accelerator(strategy=DeepSpeed(zero_stage=3, config="ds_config.json"))
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__all__: list[str] = []

__version__ = "0.1.0"

_MODULES: dict[str, str] = {}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    return found
