"""ZeRO for accel-core over DeepSpeed: parameters, gradients and optimizer state are sharded.

    Accelerator(strategy="deepspeed")
    Accelerator(strategy=DeepSpeed(zero_stage=3, config="ds_config.json"))

strategy            the options, and the hooks of the core that it owns
model_engine        the engine of one model: forwards, backwards, gradients, steps
prepared_model      the module that the loop calls
flat_state          optimizer state in partitions, as the user's optimizer shows it
optimizer_double    the optimizer that DeepSpeed is given in the place of the user's
engine_internals    the use of DeepSpeed beyond its documented interface
communication       its process-wide state
sharding            parameters and state as described to a checkpoint
export              the same for readers and writers of weights
zero_init           models that are never whole on one process; clipping: norms over parts
configuration, …    the configuration, checked and completed; configured_…: objects named in it
plugin, placeholders, older_names    the options under their older names
engine_names        what transformers' Trainer asks of an engine
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from accel_deepspeed.engine_names import add_engine_names
    from accel_deepspeed.older_names import HfDeepSpeedConfig
    from accel_deepspeed.placeholders import DummyOptim, DummyScheduler
    from accel_deepspeed.plugin import DeepSpeedPlugin, get_active_deepspeed_plugin
    from accel_deepspeed.strategy import DeepSpeed

__all__ = [
    "DeepSpeed",
    "DeepSpeedPlugin",
    "DummyOptim",
    "DummyScheduler",
    "HfDeepSpeedConfig",
    "add_engine_names",
    "get_active_deepspeed_plugin",
]

__version__ = "0.1.0"

_MODULES = {
    "DeepSpeed": "strategy",
    "DeepSpeedPlugin": "plugin",
    "DummyOptim": "placeholders",
    "DummyScheduler": "placeholders",
    "HfDeepSpeedConfig": "older_names",
    "add_engine_names": "engine_names",
    "get_active_deepspeed_plugin": "plugin",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    return found
