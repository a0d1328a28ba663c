"""Option classes, and lists of words."""

from accel_big_model import BnbQuantizationConfig
from accel_compat.missing_names import refuse_from
from accel_compat.nested import TensorInformation
from accel_compat.plugins import (
    AORecipeKwargs,
    AutocastKwargs,
    BaseEnum,
    ComputeEnvironment,
    CustomDtype,
    DataLoaderConfiguration,
    DDPCommunicationHookType,
    DeepSpeedPlugin,
    DeepSpeedSequenceParallelConfig,
    DistributedDataParallelKwargs,
    DynamoBackend,
    EnumWithContains,
    FP8BackendType,
    FP8RecipeKwargs,
    FullyShardedDataParallelPlugin,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    KwargsHandler,
    LoggerType,
    MegatronLMPlugin,
    MSAMPRecipeKwargs,
    PrecisionType,
    ProfileKwargs,
    ProjectConfiguration,
    RNGType,
    SageMakerDistributedType,
    TERecipeKwargs,
    TorchContextParallelConfig,
    TorchDynamoPlugin,
    TorchTensorParallelConfig,
    TorchTensorParallelPlugin,
)
from accel_compat.plugins.module_classes import get_module_class_from_name
from accel_core import DistributedType

__getattr__ = refuse_from(__name__)

__all__ = [
    "AORecipeKwargs", "AutocastKwargs", "BaseEnum", "BnbQuantizationConfig", "ComputeEnvironment", "CustomDtype",
    "DDPCommunicationHookType", "DataLoaderConfiguration", "DeepSpeedPlugin", "DeepSpeedSequenceParallelConfig",
    "DistributedDataParallelKwargs", "DistributedType", "DynamoBackend", "EnumWithContains", "FP8BackendType",
    "FP8RecipeKwargs", "FullyShardedDataParallelPlugin", "GradScalerKwargs", "GradientAccumulationPlugin",
    "InitProcessGroupKwargs", "KwargsHandler", "LoggerType", "MSAMPRecipeKwargs", "MegatronLMPlugin", "PrecisionType",
    "ProfileKwargs", "ProjectConfiguration", "RNGType", "SageMakerDistributedType", "TERecipeKwargs",
    "TensorInformation", "TorchContextParallelConfig", "TorchDynamoPlugin", "TorchTensorParallelConfig",
    "TorchTensorParallelPlugin", "get_module_class_from_name",
]  # fmt: skip
