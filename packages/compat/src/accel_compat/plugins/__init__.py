"""Data classes that scripts write options in: fields and defaults are Accelerate's, `ours()` gives our object.

They may be changed after they were made, and subclassed. What is not given is read from the variables that Accelerate's launcher
sets, as it does.
"""

from __future__ import annotations

from accel_compat.plugins.deepspeed import DeepSpeedPlugin
from accel_compat.plugins.enums import (
    BaseEnum,
    ComputeEnvironment,
    CustomDtype,
    DDPCommunicationHookType,
    DynamoBackend,
    EnumWithContains,
    FP8BackendType,
    LoggerType,
    PrecisionType,
    RNGType,
    SageMakerDistributedType,
)
from accel_compat.plugins.fp8 import AORecipeKwargs, FP8RecipeKwargs, MSAMPRecipeKwargs, TERecipeKwargs
from accel_compat.plugins.fsdp import FullyShardedDataParallelPlugin
from accel_compat.plugins.handlers import (
    AutocastKwargs,
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    KwargsHandler,
    ProfileKwargs,
    TorchDynamoPlugin,
)
from accel_compat.plugins.loading import DataLoaderConfiguration, ProjectConfiguration
from accel_compat.plugins.megatron import MegatronLMPlugin
from accel_compat.plugins.parallelism import (
    DeepSpeedSequenceParallelConfig,
    ParallelismConfig,
    TorchContextParallelConfig,
    TorchTensorParallelConfig,
    TorchTensorParallelPlugin,
)

__all__ = [
    "AORecipeKwargs", "AutocastKwargs", "BaseEnum", "ComputeEnvironment", "CustomDtype", "DDPCommunicationHookType",
    "DataLoaderConfiguration", "DeepSpeedPlugin", "DeepSpeedSequenceParallelConfig", "DistributedDataParallelKwargs",
    "DynamoBackend", "EnumWithContains", "FP8BackendType", "FP8RecipeKwargs", "FullyShardedDataParallelPlugin",
    "GradScalerKwargs", "GradientAccumulationPlugin", "InitProcessGroupKwargs", "KwargsHandler", "LoggerType",
    "MSAMPRecipeKwargs", "MegatronLMPlugin", "ParallelismConfig", "PrecisionType", "ProfileKwargs",
    "ProjectConfiguration", "RNGType", "SageMakerDistributedType", "TERecipeKwargs", "TorchContextParallelConfig",
    "TorchDynamoPlugin", "TorchTensorParallelConfig", "TorchTensorParallelPlugin",
]  # fmt: skip
