"""ZeRO for accel-core over DeepSpeed: parameters, gradients and optimizer state are shared out among the processes.

    Accelerator(strategy="deepspeed")
    Accelerator(strategy=DeepSpeed(zero_stage=3, config="ds_config.json"))

strategy            the options, and the hooks of the core that it owns
model_engine        the engine of one model: forwards, backwards, gradients, steps; prepared_model: what the loop calls
optimizer_double    the optimizer that DeepSpeed is given in the place of the user's
engine_internals    what is used of DeepSpeed beyond its documented interface
communication       what DeepSpeed keeps in the process
sharding            how parameters and state are described to a checkpoint; clipping: norms over parts
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from accel_deepspeed.strategy import DeepSpeed

__all__ = ["DeepSpeed"]

__version__ = "0.1.0"

_MODULES = {"DeepSpeed": "strategy"}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    return found
