"""Megatron-core under accel-core: tensor, sequence, pipeline and expert parallelism.

Accelerator(strategy=Megatron(tensor_parallel=2, pipeline_parallel=2))
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from accel_megatron.conversion import ROPE, Family, Row, find_family, from_transformers, to_transformers
    from accel_megatron.plugin import MegatronLMPlugin
    from accel_megatron.strategy import Megatron

__all__ = [
    "ROPE",
    "Family",
    "Megatron",
    "MegatronLMPlugin",
    "Row",
    "find_family",
    "from_transformers",
    "to_transformers",
]

__version__ = "0.1.0"

_MODULES = {
    "Megatron": "strategy",
    "MegatronLMPlugin": "plugin",
    **dict.fromkeys(["ROPE", "Family", "Row", "find_family", "from_transformers", "to_transformers"], "conversion"),
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    return found
