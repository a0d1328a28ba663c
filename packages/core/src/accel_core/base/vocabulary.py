"""Names that the core knows only as words.

No other file of the core names a strategy, a vendor or a service. What stands here is data: it
completes messages and serves older public names, and nothing branches on it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from types import MappingProxyType
from typing import TYPE_CHECKING, TypedDict

from accel_core.base.deprecation import Deprecation

if TYPE_CHECKING:
    from accel_core.contract.strategy import Strategy
    from accel_core.options.handlers import KwargsHandler


class Word(str, Enum):
    """A word of a closed list: a text, also where it is printed or formatted, whatever the version of Python."""

    def __str__(self) -> str:
        return str(self.value)


class LoggerType(Word):
    """The usual names for `Accelerator(log_with=...)`; `ALL` stands for every tracker that is installed."""

    ALL = "all"
    AIM = "aim"
    CLEARML = "clearml"
    COMETML = "comet_ml"
    DVCLIVE = "dvclive"
    JSONL = "jsonl"
    MLFLOW = "mlflow"
    SWANLAB = "swanlab"
    TENSORBOARD = "tensorboard"
    TRACKIO = "trackio"
    WANDB = "wandb"


KNOWN_PROVIDERS: Mapping[str, Mapping[str, str | None]] = MappingProxyType(
    {
        "accel.strategies": {
            "deepspeed": "accel-deepspeed",
            "fsdp": "accel-fsdp",
            "megatron_lm": None,
        },
        "accel.precisions": dict.fromkeys(
            ("bf16", "bf16-true", "fp16", "fp16-true", "fp8", "mxfp8"), "accel-precision"
        ),
        "accel.loaders": {"sharded": "accel-data"},
        "accel.trackers": {str(kind): "accel-trackers" for kind in LoggerType if kind is not LoggerType.ALL},
        "accel.checkpoints": {"neutral": "accel-checkpoint"},
        "accel.importers": {"deepspeed": "accel-deepspeed"},
        "accel.recorders": {"background": "accel-trackers"},
        "accel.diagnostics": {"nonfinite": "accel-diagnostics"},
        "accel.commands": {"checkpoint": "accel-checkpoint", "deepspeed": "accel-deepspeed"},
    }
)
"""Which distribution to install for a name that nothing installed offers: entry-point group → name → distribution.

None: scripts use the name, and no distribution offers it yet.
"""


ELSEWHERE: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(
            (
                "BatchSamplerShard", "DataLoaderConfiguration", "DataLoaderDispatcher", "DataLoaderShard",
                "IterableDatasetShard", "SeedableRandomSampler", "prepare_data_loader", "skip_first_batches", "slice_tensors",
            ),
            "accel-data",
        ),
        **dict.fromkeys(("AORecipeKwargs", "FP8RecipeKwargs", "GradScalerKwargs", "TERecipeKwargs"), "accel-precision"),
        "FullyShardedDataParallelPlugin": "accel-fsdp",
        **dict.fromkeys(
            ("DeepSpeedPlugin", "DummyOptim", "DummyScheduler", "HfDeepSpeedConfig", "get_active_deepspeed_plugin"),
            "accel-deepspeed",
        ),
        **dict.fromkeys(("debug_launcher", "notebook_launcher"), "accel-launch"),
    }
)  # fmt: skip
"""Names that scripts look for in the core, and that are in the package of another distribution: name → distribution."""


class OlderArguments(TypedDict, total=False):
    """Older arguments of the Accelerator, for type checkers, which find every other name wrong.

    A third party's strategy may be given by its own `<name>_plugin` too, which no checker knows:
    write `strategy=`.
    """

    deepspeed_plugin: Strategy | Mapping[str, Strategy] | None
    deepspeed_plugins: Strategy | Mapping[str, Strategy] | None
    fsdp_plugin: Strategy | Mapping[str, Strategy] | None
    megatron_lm_plugin: Strategy | Mapping[str, Strategy] | None
    kwarg_handler: Sequence[KwargsHandler]
    step_with_optimizer: bool


OUT_OF_MEMORY_MESSAGES: tuple[str, ...] = (
    "out of memory",  # torch's allocators on accelerators, MPS, and the runtimes of CUDA and HIP
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",  # Windows
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_NOT_SUPPORTED",  # also what cuDNN says when there is no room for its workspace
    "UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY",  # XPU
    "UR_RESULT_ERROR_OUT_OF_HOST_MEMORY",
    "UR_RESULT_ERROR_OUT_OF_RESOURCES",
    "MODULE:PT_DEVMEM Allocation failed",  # HPU
    "RESOURCE_EXHAUSTED",  # XLA
)
"""How a `RuntimeError` says that memory ran out, where it has no class of its own: parts of messages."""


class RNGType(Word):
    """Random streams that all ranks can be made to share, as in `Accelerator(rng_types=["generator"])`.

    `TORCH` is torch's global stream on the CPU, `GENERATOR` the generators that were handed to a
    loader's samplers; all others are the global streams of types of device.
    """

    TORCH = "torch"
    CUDA = "cuda"
    GENERATOR = "generator"
    HPU = "hpu"
    MLU = "mlu"
    MPS = "mps"
    MUSA = "musa"
    NPU = "npu"
    SDAA = "sdaa"
    XLA = "xla"
    XPU = "xpu"


class PrecisionType(Word):
    """The usual names for `Accelerator(mixed_precision=...)`; any installed precision may be named by its text."""

    NO = "no"
    FP8 = "fp8"
    FP16 = "fp16"
    BF16 = "bf16"


class DynamoBackend(Word):
    """Backends for `Accelerator(dynamo_backend=...)`, as `torch.compile` spells them; capitals are taken as well.

    Which of them work depends on torch and on what is installed:
    `torch.compiler.list_backends(exclude_tags=())`.
    """

    NO = "no"
    EAGER = "eager"
    AOT_EAGER = "aot_eager"
    INDUCTOR = "inductor"
    AOT_TS_NVFUSER = "aot_ts_nvfuser"
    NVPRIMS_NVFUSER = "nvprims_nvfuser"
    CUDAGRAPHS = "cudagraphs"
    OFI = "ofi"
    FX2TRT = "fx2trt"
    ONNXRT = "onnxrt"
    TENSORRT = "tensorrt"
    AOT_TORCHXLA_TRACE_ONCE = "aot_torchxla_trace_once"
    TORCHXLA_TRACE_ONCE = "torchxla_trace_once"
    TVM = "tvm"
    HPU_BACKEND = "hpu_backend"
    NEURON = "neuron"

    @classmethod
    def _missing_(cls, value: object) -> DynamoBackend | None:
        lowered = value.lower() if isinstance(value, str) else value
        return next((member for member in cls if member.value == lowered), None)


_TPU = Deprecation("DistributedType.TPU", "DistributedType.XLA", removed_in="1.0")


class _Tpu:
    """An older name of a member: warns whenever it is read."""

    def __get__(self, _: object, owner: type[DistributedType]) -> DistributedType:
        _TPU.warn()
        return owner.XLA


class DistributedType(Word):
    """The kind of distributed training, in one word: the value of `accelerator.distributed_type`.

    A strategy declares its word, or is called by its own name. So any text is a value, and equal to
    that text; compare with `==`, for there is no single object of those outside of the list.
    """

    NO = "NO"
    MULTI_CPU = "MULTI_CPU"
    MULTI_GPU = "MULTI_GPU"
    MULTI_HPU = "MULTI_HPU"
    MULTI_MLU = "MULTI_MLU"
    MULTI_MUSA = "MULTI_MUSA"
    MULTI_NEURON = "MULTI_NEURON"
    MULTI_NPU = "MULTI_NPU"
    MULTI_SDAA = "MULTI_SDAA"
    MULTI_XPU = "MULTI_XPU"
    DEEPSPEED = "DEEPSPEED"
    FSDP = "FSDP"
    MEGATRON_LM = "MEGATRON_LM"
    XLA = "XLA"
    TPU = _Tpu()

    @classmethod
    def _missing_(cls, value: object) -> DistributedType | None:
        if value == "TPU":
            _TPU.warn()
            return cls.XLA
        if not isinstance(value, str) or not value:
            return None
        word = str.__new__(cls, value)
        word._name_ = word._value_ = value
        return word

    def __reduce_ex__(self, _: object) -> tuple[type[DistributedType], tuple[str]]:
        """By value in every version of Python: some pickle members by name, which only those of the list have."""
        return type(self), (str(self.value),)


ONE_PROCESS = DistributedType.NO.value
"""The word for a process that trains alone."""

SEVERAL_PROCESSES: Mapping[str, str] = MappingProxyType(
    {
        "cpu": DistributedType.MULTI_CPU.value,
        "cuda": DistributedType.MULTI_GPU.value,
        "xla": DistributedType.XLA.value,
        **{kind: f"MULTI_{kind.upper()}" for kind in ("hpu", "mlu", "musa", "neuron", "npu", "sdaa", "xpu")},
    }
)
"""The word for processes that each hold a whole model: type of their device → value of `DistributedType`."""
