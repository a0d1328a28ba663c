"""Questions about what is installed, and what this machine computes on. Nothing that is asked about is imported."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from importlib import metadata
from importlib.util import find_spec
from typing import Any, TypeVar

import torch

from accel_compat.plugins.variables import flag
from accel_compat.versions import compare_versions, is_torch_version

Function = TypeVar("Function", bound=Callable[..., Any])

USE_TORCH_XLA = False
"""torch_xla is not supported, installed or not."""


def is_installed(module: str, distribution: str | None = None, at_least: str | None = None) -> bool:
    """Whether a module is there together with the distribution that it comes from, not a folder of that name."""
    if find_spec(module) is None:
        return False
    try:
        metadata.version(distribution or module)
    except metadata.PackageNotFoundError:
        return False
    return at_least is None or compare_versions(distribution or module, ">=", at_least)


def _asks_for(module: str, distribution: str | None = None) -> Callable[[], bool]:
    def is_available() -> bool:
        return is_installed(module, distribution)

    is_available.__doc__ = f"Whether {distribution or module} is installed."
    return is_available


is_amdsmi_available = _asks_for("amdsmi")
is_boto3_available = _asks_for("boto3")
is_clearml_available = _asks_for("clearml")
is_comet_ml_available = _asks_for("comet_ml")
is_datasets_available = _asks_for("datasets")
is_deepspeed_available = _asks_for("deepspeed")
is_dvclive_available = _asks_for("dvclive")
is_import_timer_available = _asks_for("import_timer")
is_lomo_available = _asks_for("lomo_optim")
is_matplotlib_available = _asks_for("matplotlib")
is_msamp_available = _asks_for("msamp", "ms-amp")
is_pandas_available = _asks_for("pandas")
is_peft_available = _asks_for("peft")
is_pytest_available = _asks_for("pytest")
is_sagemaker_available = _asks_for("sagemaker")
is_schedulefree_available = _asks_for("schedulefree")
is_swanlab_available = _asks_for("swanlab")
is_timm_available = _asks_for("timm")
is_torchdata_available = _asks_for("torchdata")
is_torchvision_available = _asks_for("torchvision")
is_tqdm_available = _asks_for("tqdm")
is_trackio_available = _asks_for("trackio")
is_transformer_engine_available = _asks_for("transformer_engine", "transformer-engine")
is_transformers_available = _asks_for("transformers")
is_triton_available = _asks_for("triton")
is_wandb_available = _asks_for("wandb")


def is_aim_available() -> bool:
    """Whether aim is installed, in a version before 4."""
    return is_installed("aim") and compare_versions("aim", "<", "4.0.0")


def is_mlflow_available() -> bool:
    """Whether mlflow is installed, whole or as mlflow-skinny."""
    return is_installed("mlflow") or is_installed("mlflow", "mlflow-skinny")


def is_pynvml_available() -> bool:
    """Whether NVIDIA's management library can be asked."""
    return is_installed("pynvml") or is_installed("pynvml", "nvidia-ml-py")


def is_tensorboard_available() -> bool:
    """Whether tensorboard or tensorboardX is installed."""
    return is_installed("tensorboard") or is_installed("tensorboardX")


def is_rich_available() -> bool:
    """Whether rich is installed, and asked for by ACCELERATE_ENABLE_RICH."""
    return is_installed("rich") and flag(os.environ.get("ACCELERATE_ENABLE_RICH", "no"))


def is_torchao_available() -> bool:
    """Whether torchao is installed."""
    return is_installed("torchao", at_least="0.6.1")


def is_torchdata_stateful_dataloader_available() -> bool:
    """Whether torchdata has the stateful loader."""
    return is_installed("torchdata", at_least="0.8.0")


def is_bnb_available(min_version: str | None = None) -> bool:
    """Whether bitsandbytes is installed, in this version or a later one."""
    return is_installed("bitsandbytes", at_least=min_version)


def is_4bit_bnb_available() -> bool:
    """Whether bitsandbytes has layers of 4 bits."""
    return is_bnb_available("0.39.0")


def is_8bit_bnb_available() -> bool:
    """Whether bitsandbytes has layers of 8 bits."""
    return is_bnb_available("0.37.2")


def is_bitsandbytes_multi_backend_available() -> bool:
    """Whether bitsandbytes says that it computes on more than NVIDIA's devices."""
    if not is_bnb_available():
        return False
    import bitsandbytes  # type: ignore[import-untyped,unused-ignore]

    return "multi_backend" in getattr(bitsandbytes, "features", ())


def is_transformer_engine_mxfp8_available() -> bool:
    """Whether Transformer Engine is installed, and the device has its blocks of fp8."""
    if not is_transformer_engine_available():
        return False
    from transformer_engine.pytorch.fp8 import check_mxfp8_support

    return bool(check_mxfp8_support()[0])


def is_megatron_lm_available() -> bool:
    """Whether Megatron-core is installed, and accel-megatron, which trains with it."""
    return is_installed("megatron", "megatron-core") and is_installed("accel_megatron", "accel-megatron")


def is_numpy_available(min_version: str = "1.25.0") -> bool:
    """Whether numpy is installed, in this version or a later one."""
    return is_installed("numpy", at_least=min_version)


def is_pippy_available() -> bool:
    """Whether torch has pipelines, as every supported one has."""
    return True


def is_weights_only_available() -> bool:
    """Whether torch loads files without executing code, as every supported one does."""
    return True


def is_torch_distributed_available() -> bool:
    """Whether torch was built with `torch.distributed`."""
    return torch.distributed.is_available()


def is_xccl_available() -> bool:
    """Whether torch was built with the backend for Intel's devices."""
    return bool(torch.distributed.distributed_c10d.is_xccl_available())


def is_torch_xla_available(check_is_tpu: bool = False, check_is_gpu: bool = False) -> bool:  # noqa: ARG001  # no device of it
    """False: torch_xla is not supported."""
    return False


def is_cuda_available() -> bool:
    """Whether there is an NVIDIA or AMD device; does not initialise it, so that a fork is still possible."""
    before = os.environ.get("PYTORCH_NVML_BASED_CUDA_CHECK")
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    try:
        return torch.cuda.is_available()
    finally:
        if before is None:
            del os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"]
        else:
            os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = before


def is_rocm_available() -> bool:
    """Whether there is an AMD device."""
    return torch.version.hip is not None and torch.cuda.is_available()


def is_mps_available(min_version: str = "1.12") -> bool:
    """Whether there is a device of Apple's, and a torch of this version."""
    return is_torch_version(">=", min_version) and torch.backends.mps.is_available() and torch.backends.mps.is_built()


@functools.cache
def is_xpu_available(check_device: bool = False) -> bool:  # noqa: ARG001  # asking torch is cheap
    """Whether there is a device of Intel's."""
    return torch.xpu.is_available()


def _extension(device: str, module: str) -> bool:
    """Whether an extension brings a kind of device; torch imports it by itself, through its entry point."""
    kind = getattr(torch, device, None) if find_spec(module.partition(".")[0]) is not None else None
    return kind is not None and bool(kind.is_available())


@functools.cache
def is_mlu_available(check_device: bool = False) -> bool:  # noqa: ARG001  # asking torch is cheap
    """Whether there is a device of Cambricon's."""
    return _extension("mlu", "torch_mlu")


@functools.cache
def is_musa_available(check_device: bool = False) -> bool:  # noqa: ARG001  # asking torch is cheap
    """Whether there is a device of Moore Threads'."""
    return _extension("musa", "torch_musa")


@functools.cache
def is_npu_available(check_device: bool = False) -> bool:  # noqa: ARG001  # asking torch is cheap
    """Whether there is a device of Huawei's."""
    return _extension("npu", "torch_npu")


@functools.cache
def is_sdaa_available(check_device: bool = False) -> bool:  # noqa: ARG001  # asking torch is cheap
    """Whether there is a device of Tecorigin's."""
    return _extension("sdaa", "torch_sdaa")


@functools.cache
def is_hpu_available(init_hccl: bool = False) -> bool:  # noqa: ARG001  # the process group does that
    """Whether there is a device of Habana's."""
    return _extension("hpu", "habana_frameworks")


@functools.cache
def is_neuron_available(check_device: bool = False) -> bool:  # noqa: ARG001  # asking torch is cheap
    """Whether there is a device of Amazon's."""
    return _extension("neuron", "torch_neuronx")


def is_habana_gaudi1() -> bool:
    """Whether the device is of Habana's first kind, which has no float16."""
    return is_hpu_available() and str(torch.get_device_module("hpu").get_device_name()).upper() == "GAUDI"


def is_bf16_available(ignore_tpu: bool = False) -> bool:  # noqa: ARG001  # no such device
    """Whether the device computes in bfloat16."""
    for device, is_there in (("cuda", is_cuda_available), ("mlu", is_mlu_available), ("xpu", is_xpu_available)):
        if is_there():
            return bool(torch.get_device_module(device).is_bf16_supported())
    return torch.backends.mps.is_macos_or_newer(14, 0) if is_mps_available() else True


def is_fp16_available() -> bool:
    """Whether the device computes in float16."""
    return not is_habana_gaudi1()


def is_fp8_available() -> bool:
    """Whether a library is installed that computes in fp8."""
    return is_msamp_available() or is_transformer_engine_available() or is_torchao_available()


def torchao_required(func: Function) -> Function:
    """A function that raises `ImportError` without torchao."""
    return _required(func, is_torchao_available, "torchao")


def deepspeed_required(func: Function) -> Function:
    """A function that raises `ImportError` without deepspeed."""
    return _required(func, is_deepspeed_available, "deepspeed")


def _required(func: Function, is_there: Callable[[], bool], name: str) -> Function:
    @functools.wraps(func)
    def checked(*args: Any, **kwargs: Any) -> Any:
        if not is_there():
            raise ImportError(f"{func.__name__} takes {name}, which is not installed. Type: pip install {name}")
        return func(*args, **kwargs)

    return checked  # type: ignore[return-value]  # the signature is kept
