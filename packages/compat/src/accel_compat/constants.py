"""Names of files and of options that scripts read."""

from __future__ import annotations

from torch import nn

MODEL_NAME, SAFE_MODEL_NAME, OPTIMIZER_NAME, SCHEDULER_NAME = "pytorch_model", "model", "optimizer", "scheduler"
SAMPLER_NAME, SCALER_NAME, RNG_STATE_NAME, PROFILE_PATTERN_NAME = (
    "sampler",
    "scaler.pt",
    "random_states",
    "profile_{suffix}.json",
)
WEIGHTS_NAME, WEIGHTS_PATTERN_NAME = f"{MODEL_NAME}.bin", f"{MODEL_NAME}{{suffix}}.bin"
SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_PATTERN_NAME = (
    f"{SAFE_MODEL_NAME}.safetensors",
    f"{SAFE_MODEL_NAME}{{suffix}}.safetensors",
)
WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_INDEX_NAME = f"{WEIGHTS_NAME}.index.json", f"{SAFE_WEIGHTS_NAME}.index.json"
FSDP_MODEL_NAME = "pytorch_model_fsdp"

FSDP_STATE_DICT_TYPE = ["FULL_STATE_DICT", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT"]
FSDP2_STATE_DICT_TYPE = ["SHARDED_STATE_DICT", "FULL_STATE_DICT"]
TORCH_DYNAMO_MODES = ["default", "reduce-overhead", "max-autotune"]
DEEPSPEED_MULTINODE_LAUNCHERS = ["pdsh", "standard", "openmpi", "mvapich", "mpich", "nossh", "slurm"]

DTENSOR_PYTORCH_VERSION, FSDP_PYTORCH_VERSION, FSDP2_PYTORCH_VERSION = "2.5.0", "2.1.0", "2.6.0"
ELASTIC_LOG_LINE_PREFIX_TEMPLATE_PYTORCH_VERSION = "2.2.0"
XPU_PROFILING_AVAILABLE_PYTORCH_VERSION, MITA_PROFILING_AVAILABLE_PYTORCH_VERSION = "2.4.0", "2.1.0"
BETA_TP_AVAILABLE_PYTORCH_VERSION, BETA_CP_AVAILABLE_PYTORCH_VERSION = "2.3.0", "2.6.0"
BETA_TP_AVAILABLE_TRANSFORMERS_VERSION, BETA_SP_AVAILABLE_DEEPSPEED_VERSION = "4.52.0", "0.18.2"

CUDA_DISTRIBUTED_TYPES = ["DEEPSPEED", "MULTI_GPU", "FSDP", "MEGATRON_LM", "TP"]
_OTHERS = ("NPU", "MLU", "SDAA", "MUSA", "XPU", "CPU", "HPU", "NEURON")
TORCH_DISTRIBUTED_OPERATION_TYPES = [*CUDA_DISTRIBUTED_TYPES, *(f"MULTI_{kind}" for kind in _OTHERS)]
SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING = (
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
    nn.Linear,
)

__all__ = [name for name in globals() if name.isupper() and not name.startswith("_")]
