"""Fully sharded training for accel-core: every process holds a part of parameters and states.

Accelerator(strategy="fsdp")
Accelerator(strategy=FSDP(replicate=2, activation_checkpointing=True))

strategy                options, and the hooks of the core that it owns
preparing, validation   the order in which a model is made ready, and what is refused before
mesh                    replicas, shards, context and tensor peers
wrapping                which modules are gathered at a time
gathering               in which dtypes they are; output_views: what they return
meta_init               models that are never whole on one process
optimizers              optimizers over shards
gradient_sync           when gradients are reduced; unsharded_parameters: those of the others
clipping                norms over shards
sharding, export        how shards are described to a checkpoint, and made whole
engine_internals        every private name of torch that is used
tensor_parallel, context_parallel, activation_checkpointing    further ways to need less memory
plugin                  options under their older names
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
