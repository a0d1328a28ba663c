"""One PyTorch training loop for any hardware and any engine.

    from accel_core import Accelerator

See `Accelerator` for the loop, `accel_core.hookspecs` for what a plugin can take over, and `accel_core.testing` for what
defines a strategy.
"""

from accel_core.accelerator import Accelerator
from accel_core.errors import CollectiveMismatchError, NotInstalledError, PluginError, WorldError
from accel_core.feed import Feed, Passage, Rows
from accel_core.handlers import (
    AutocastKwargs,
    GradientAccumulationPlugin,
    InitProcessGroupKwargs,
    KwargsHandler,
)
from accel_core.hookspecs import hookimpl
from accel_core.layout import Layout, Shard
from accel_core.logs import get_logger
from accel_core.optimizer import SKIPPED
from accel_core.precision import Precision, PrecisionPolicy
from accel_core.prepare import PrepareRequest
from accel_core.seeding import set_seed
from accel_core.strategies import DDP, DistributedDataParallelKwargs, Single, Strategy, place_model
from accel_core.vocabulary import RNGType
from accel_core.world import World

__all__ = [
    "DDP",
    "SKIPPED",
    "Accelerator",
    "AutocastKwargs",
    "CollectiveMismatchError",
    "DistributedDataParallelKwargs",
    "Feed",
    "GradientAccumulationPlugin",
    "InitProcessGroupKwargs",
    "KwargsHandler",
    "Layout",
    "NotInstalledError",
    "Passage",
    "PluginError",
    "Precision",
    "PrecisionPolicy",
    "PrepareRequest",
    "RNGType",
    "Rows",
    "Shard",
    "Single",
    "Strategy",
    "World",
    "WorldError",
    "get_logger",
    "hookimpl",
    "place_model",
    "set_seed",
]

__version__ = "0.1.0"
