"""Names for messages and older spellings, as data; nothing branches on it."""

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
    """A word of a closed list: a text, also printed or formatted, in every version of Python."""

    def __str__(self) -> str:
        return str(self.value)


class LoggerType(Word):
    """The usual names for `Accelerator(log_with=...)`; `ALL` is every installed tracker."""

    ALL, AIM, CLEARML, COMETML, DVCLIVE, JSONL = "all", "aim", "clearml", "comet_ml", "dvclive", "jsonl"
    MLFLOW, SWANLAB, TENSORBOARD, TRACKIO, WANDB = "mlflow", "swanlab", "tensorboard", "trackio", "wandb"


_STRATEGIES = {
    "deepspeed": "accel-deepspeed",
    "dispatch": "accel-big-model",
    "fsdp": "accel-fsdp",
    "megatron": "accel-megatron",
    "xla": "accel-xla",
}
_COMMANDS = {
    "checkpoint": "checkpoint",
    "check-script": "compat",
    "deepspeed": "deepspeed",
    "estimate-memory": "big-model",
    "plan": "big-model",
    "verify-resume": "diagnostics",
}
_PRECISIONS = ("bf16", "bf16-true", "fp16", "fp16-true", "fp8", "mxfp8", "tf32")
KNOWN_PROVIDERS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "accel.strategies": _STRATEGIES,
        "accel.precisions": dict.fromkeys(_PRECISIONS, "accel-precision"),
        "accel.loaders": {"sharded": "accel-data"},
        "accel.trackers": {str(kind): "accel-trackers" for kind in LoggerType if kind is not LoggerType.ALL},
        "accel.checkpoints": {"neutral": "accel-checkpoint"},
        "accel.importers": {"accelerate": "accel-compat", "deepspeed": "accel-deepspeed"},
        "accel.configurations": {"accelerate": "accel-compat"},
        "accel.recorders": {"background": "accel-trackers"},
        "accel.placements": {"device_map": "accel-big-model"},
        "accel.diagnostics": {"nonfinite": "accel-diagnostics"},
        "accel.commands": {name: f"accel-{package}" for name, package in _COMMANDS.items()},
    }
)
"""Entry-point group → name → the distribution to install for it."""

_NAMES_OF = {
    "accel-data": (
        "BatchSamplerShard DataLoaderConfiguration DataLoaderDispatcher DataLoaderShard IterableDatasetShard "
        "SeedableRandomSampler prepare_data_loader skip_first_batches slice_tensors"
    ),
    "accel-precision": "AORecipeKwargs FP8RecipeKwargs GradScalerKwargs TERecipeKwargs",
    "accel-fsdp": "FullyShardedDataParallelPlugin",
    "accel-megatron": "MegatronLMPlugin",
    "accel-deepspeed": "DeepSpeedPlugin DummyOptim DummyScheduler HfDeepSpeedConfig get_active_deepspeed_plugin",
    "accel-diagnostics": "Finding",
    "accel-launch": "debug_launcher notebook_launcher",
}
ELSEWHERE: Mapping[str, str] = MappingProxyType(
    {name: distribution for distribution, names in _NAMES_OF.items() for name in names.split()}
)
"""Names that scripts look for in the core, and that are in the package of another distribution: name → distribution."""


_FOLDERS = {"deepspeed": "deepspeed-plugin", "fsdp": "fsdp-plugin", "megatron": "megatron-plugin", "xla": "xla-plugin"}
_PACKAGES = "all big-model checkpoint compat core data deepspeed diagnostics fsdp launch megatron precision testing trackers xla"
UNPUBLISHED: Mapping[str, str] = MappingProxyType({f"accel-{n}": _FOLDERS.get(n, n) for n in _PACKAGES.split()})
"""Distributions of this repository that no package index has yet, with their folders in `packages`. What is published leaves."""


class OlderArguments(TypedDict, total=False):
    """Older arguments of the Accelerator, for type checkers; no `<name>_plugin` of others."""

    deepspeed_plugin: Strategy | Mapping[str, Strategy] | None
    deepspeed_plugins: Strategy | Mapping[str, Strategy] | None
    fsdp_plugin: Strategy | Mapping[str, Strategy] | None
    megatron_lm_plugin: Strategy | Mapping[str, Strategy] | None
    kwarg_handler: Sequence[KwargsHandler]
    step_with_optimizer: bool


OUT_OF_MEMORY_MESSAGES: tuple[str, ...] = (
    "out of memory",  # torch's allocators on accelerators, MPS, and the runtimes of CUDA and HIP
    *("DefaultCPUAllocator: can't allocate memory", "DefaultCPUAllocator: not enough memory"),
    *("CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED"),
    "CUDNN_STATUS_NOT_SUPPORTED",  # also what cuDNN says when there is no room for its workspace
    *(f"UR_RESULT_ERROR_OUT_OF_{what}" for what in ("DEVICE_MEMORY", "HOST_MEMORY", "RESOURCES")),  # XPU
    *("MODULE:PT_DEVMEM Allocation failed", "RESOURCE_EXHAUSTED"),  # HPU, XLA
)
"""How a `RuntimeError` says that memory ran out, where it has no class of its own: parts of messages."""

UNKNOWN_DEVICES = (("torch_xla", "accel-xla"), ("/dev/accel0", "accel-xla"))
"""Devices that torch does not know: what a machine with one has, and the distribution that trains on it."""

ABSENT = (
    ("cuda", "/dev/nvidia0", "`nvidia-smi` says whether its driver is here and new enough for this torch."),
    ("hip", "/dev/kfd", "`rocminfo` says whether its driver is here, and whether this user may use it."),
)
"""Where torch finds no accelerator: what torch is built for, "" for any; a module, or a device file; what to do."""


class RNGType(Word):
    """Random streams that ranks can share: torch's global ones, samplers' `GENERATOR`s."""

    TORCH, CUDA, GENERATOR, HPU, MLU, MPS = "torch", "cuda", "generator", "hpu", "mlu", "mps"
    MUSA, NPU, SDAA, XLA, XPU = "musa", "npu", "sdaa", "xla", "xpu"


class PrecisionType(Word):
    """The usual names for `Accelerator(mixed_precision=...)`; others are given as text."""

    NO, FP8, FP16, BF16 = "no", "fp8", "fp16", "bf16"


class DynamoBackend(Word):
    """Backends for `Accelerator(dynamo_backend=...)`: names of `torch.compile`, in either case."""

    NO, EAGER, AOT_EAGER, INDUCTOR, AOT_TS_NVFUSER = "no", "eager", "aot_eager", "inductor", "aot_ts_nvfuser"
    NVPRIMS_NVFUSER, CUDAGRAPHS, OFI, FX2TRT = "nvprims_nvfuser", "cudagraphs", "ofi", "fx2trt"
    ONNXRT, TENSORRT = "onnxrt", "tensorrt"
    AOT_TORCHXLA_TRACE_ONCE, TORCHXLA_TRACE_ONCE = "aot_torchxla_trace_once", "torchxla_trace_once"
    TVM, HPU_BACKEND, NEURON = "tvm", "hpu_backend", "neuron"

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
    """The kind of distributed training, which a strategy declares: `accelerator.distributed_type`.

    So any text is a value, and equal to that text: compare with `==`, and not with `is`.
    """

    NO, MULTI_CPU, MULTI_GPU, MULTI_HPU, MULTI_MLU = "NO", "MULTI_CPU", "MULTI_GPU", "MULTI_HPU", "MULTI_MLU"
    MULTI_MUSA, MULTI_NEURON, MULTI_NPU, MULTI_SDAA = "MULTI_MUSA", "MULTI_NEURON", "MULTI_NPU", "MULTI_SDAA"
    MULTI_XPU, DEEPSPEED, FSDP, MEGATRON_LM, XLA = "MULTI_XPU", "DEEPSPEED", "FSDP", "MEGATRON_LM", "XLA"
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
        """By value in every Python: some pickle by name, which only members of the list have."""
        return type(self), (str(self.value),)


ONE_PROCESS = DistributedType.NO.value
"""The word for a process that trains alone."""

SEVERAL_PROCESSES: Mapping[str, str] = MappingProxyType(
    {kind: f"MULTI_{kind.upper()}" for kind in ("cpu", "hpu", "mlu", "musa", "neuron", "npu", "sdaa", "xpu")}
    | {"cuda": DistributedType.MULTI_GPU.value, "xla": DistributedType.XLA.value}
)
"""The word for processes that each hold a whole model: type of their device → value of `DistributedType`."""
