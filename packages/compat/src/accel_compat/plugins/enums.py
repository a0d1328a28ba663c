"""Closed lists of words. Members are texts, so that our packages take them as such."""

from __future__ import annotations

import enum


class EnumWithContains(enum.EnumMeta):
    """Makes `"bf16" in PrecisionType` a question in every version of Python."""

    def __contains__(cls, item: object) -> bool:
        try:
            cls(item)
        except ValueError:
            return False
        return True


class BaseEnum(enum.Enum, metaclass=EnumWithContains):
    """An enum whose members print as their values."""

    def __str__(self) -> str:
        return str(self.value)

    @classmethod
    def list(cls) -> list[str]:
        """The values of all members."""
        return [str(member) for member in cls]


class DDPCommunicationHookType(str, BaseEnum):
    """How gradients travel under DDP."""

    NO, FP16, BF16 = "no", "fp16", "bf16"
    POWER_SGD, BATCHED_POWER_SGD = "power_sgd", "batched_power_sgd"


class SageMakerDistributedType(str, enum.Enum):
    """Kinds of training of a service that is not offered here."""

    NO, DATA_PARALLEL, MODEL_PARALLEL = "NO", "DATA_PARALLEL", "MODEL_PARALLEL"


class FP8BackendType(str, enum.Enum):
    """Libraries that compute in fp8."""

    NO, TE, MSAMP, AO = "NO", "TE", "MSAMP", "AO"


class ComputeEnvironment(str, enum.Enum):
    """Where a configuration file says that a script runs."""

    LOCAL_MACHINE, AMAZON_SAGEMAKER = "LOCAL_MACHINE", "AMAZON_SAGEMAKER"


class DynamoBackend(str, BaseEnum):
    """Backends of `torch.compile`; "NO" compiles nothing. Lower case is taken, too."""

    NO, EAGER, AOT_EAGER, INDUCTOR, AOT_TS_NVFUSER = "NO", "EAGER", "AOT_EAGER", "INDUCTOR", "AOT_TS_NVFUSER"
    NVPRIMS_NVFUSER, CUDAGRAPHS, OFI, FX2TRT, ONNXRT = "NVPRIMS_NVFUSER", "CUDAGRAPHS", "OFI", "FX2TRT", "ONNXRT"
    TENSORRT, TVM, HPU_BACKEND, NEURON = "TENSORRT", "TVM", "HPU_BACKEND", "NEURON"
    AOT_TORCHXLA_TRACE_ONCE, TORCHXLA_TRACE_ONCE = "AOT_TORCHXLA_TRACE_ONCE", "TORCHXLA_TRACE_ONCE"

    @classmethod
    def _missing_(cls, value: object) -> DynamoBackend | None:
        word = value.upper() if isinstance(value, str) else value
        return next((member for member in cls if member.value == word), None)


class LoggerType(str, BaseEnum):
    """Names of trackers for `log_with`."""

    ALL, AIM, TENSORBOARD, WANDB, TRACKIO = "all", "aim", "tensorboard", "wandb", "trackio"
    COMETML, MLFLOW, CLEARML, DVCLIVE, SWANLAB = "comet_ml", "mlflow", "clearml", "dvclive", "swanlab"


class PrecisionType(str, BaseEnum):
    """The usual names for `mixed_precision`."""

    NO, FP8, FP16, BF16 = "no", "fp8", "fp16", "bf16"


class RNGType(str, BaseEnum):
    """Random streams that processes can share."""

    TORCH, CUDA, GENERATOR, HPU, MLU = "torch", "cuda", "generator", "hpu", "mlu"
    MUSA, NEURON, NPU, SDAA, XLA, XPU = "musa", "neuron", "npu", "sdaa", "xla", "xpu"


class CustomDtype(enum.Enum):
    """Dtypes that torch does not have, for the functions about device maps."""

    FP8, INT4, INT2 = "fp8", "int4", "int2"

    def __str__(self) -> str:
        return str(self.value)
