"""The Accelerator, and options that scripts import from its module."""

from accel_compat.accelerator import Accelerator
from accel_compat.missing_names import refuse_from
from accel_compat.plugins import (
    AutocastKwargs,
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    FullyShardedDataParallelPlugin,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    ProfileKwargs,
    ProjectConfiguration,
    TorchDynamoPlugin,
)

__getattr__ = refuse_from(__name__)

__all__ = [
    "Accelerator", "AutocastKwargs", "DataLoaderConfiguration", "DistributedDataParallelKwargs",
    "FullyShardedDataParallelPlugin", "GradScalerKwargs", "GradientAccumulationPlugin", "InitProcessGroupKwargs",
    "ProfileKwargs", "ProjectConfiguration", "TorchDynamoPlugin",
]  # fmt: skip
