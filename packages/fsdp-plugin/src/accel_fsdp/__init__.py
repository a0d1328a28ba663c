"""Fully sharded training for accel-core: every process holds a part of each parameter, gradient and optimizer state.

    Accelerator(strategy="fsdp")
    Accelerator(strategy=FSDP(replicate=2, activation_checkpointing=True))

strategy        the options, and the hooks of the core that it owns
preparing       the order in which a model is made ready; refusals: what is said before that
mesh            how processes are arranged: replicas, shards, context and tensor peers
units           which modules are gathered at a time; gathering: in which dtypes; outputs: what they return
materialising   models that are never whole on one process
optimizers      optimizers over parts of parameters
synchronising   when gradients travel; held: those that have not; whole_parameters: those of what is not cut
clipping        norms over parts
sharding        how parts are described to a checkpoint
tensor_parallel, context_parallel, activation_checkpointing    further ways to need less memory
plugin          the options under their older names
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from accel_fsdp.plugin import FullyShardedDataParallelPlugin
    from accel_fsdp.strategy import FSDP

__all__ = ["FSDP", "FullyShardedDataParallelPlugin"]

__version__ = "0.1.0"

_MODULES = {"FSDP": "strategy", "FullyShardedDataParallelPlugin": "plugin"}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    return found
