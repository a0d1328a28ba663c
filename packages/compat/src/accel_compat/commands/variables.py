"""What each process of a run finds in its environment: the settings, under the names that libraries read."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from typing import Any

from accel_compat.commands.options import OPTIONS

_DEEPSPEED: Mapping[str, str] = {
    "zero_stage": "DEEPSPEED_ZERO_STAGE",
    "gradient_accumulation_steps": "GRADIENT_ACCUMULATION_STEPS",
    "gradient_clipping": "GRADIENT_CLIPPING",
    "offload_optimizer_device": "DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE",
    "offload_param_device": "DEEPSPEED_OFFLOAD_PARAM_DEVICE",
    "offload_optimizer_nvme_path": "DEEPSPEED_OFFLOAD_OPTIMIZER_NVME_PATH",
    "offload_param_nvme_path": "DEEPSPEED_OFFLOAD_PARAM_NVME_PATH",
    "zero3_init_flag": "DEEPSPEED_ZERO3_INIT",
    "zero3_save_16bit_model": "DEEPSPEED_ZERO3_SAVE_16BIT_MODEL",
    "deepspeed_config_file": "DEEPSPEED_CONFIG_FILE",
    "deepspeed_moe_layer_cls_names": "DEEPSPEED_MOE_LAYER_CLS_NAMES",
}
_PATHS = ("deepspeed_config_file", "deepspeed_moe_layer_cls_names", "nvme_path")


def variables(arguments: argparse.Namespace, file_fields: str = "") -> dict[str, str]:
    """The variables of each process, from merged options.

    What is off is not set, so that what the environment says of it holds. `file_fields`: the keys
    of DeepSpeed that a file has given, between commas.
    """
    return {**dict(_general(arguments)), **dict(_of_strategy(arguments, file_fields))}


def _general(arguments: argparse.Namespace) -> Iterator[tuple[str, str]]:
    if arguments.use_cpu:
        yield "ACCELERATE_USE_CPU", "true"
    if arguments.debug:
        yield "ACCELERATE_DEBUG_MODE", "true"
    if arguments.enable_cpu_affinity:
        yield "ACCELERATE_CPU_AFFINITY", "1"
    if arguments.mixed_precision != "no" or "mixed_precision" in arguments.nondefault:
        yield "ACCELERATE_MIXED_PRECISION", str(arguments.mixed_precision).lower()
    if arguments.mixed_precision == "fp8":
        yield from _with_prefix(arguments, "fp8_", "ACCELERATE_FP8_", leave=("fp8_override_linear_precision",))
        for name, value in zip(("FPROP", "DGRAD", "WGRAD"), arguments.fp8_override_linear_precision, strict=True):
            yield f"ACCELERATE_FP8_OVERRIDE_{name}", str(value)
    if str(arguments.dynamo_backend).lower() != "no":
        yield "ACCELERATE_DYNAMO_BACKEND", str(arguments.dynamo_backend).upper()
        yield from _with_prefix(arguments, "dynamo_", "ACCELERATE_DYNAMO_", leave=("dynamo_backend",))


def _of_strategy(arguments: argparse.Namespace, file_fields: str) -> Iterator[tuple[str, str]]:
    if arguments.use_fsdp:
        yield "ACCELERATE_USE_FSDP", "true"
        for name, text in _with_prefix(arguments, "fsdp_", "FSDP_"):
            yield name.replace("TRANSFORMER_LAYER_CLS", "TRANSFORMER_CLS"), text
    if arguments.use_deepspeed:
        yield "ACCELERATE_USE_DEEPSPEED", "true"
        yield "ACCELERATE_CONFIG_DS_FIELDS", file_fields
        for option, name in _DEEPSPEED.items():
            value = getattr(arguments, option, None)
            if value is not None:
                yield f"ACCELERATE_{name}", str(value) if option.endswith(_PATHS) else str(value).lower()
    if arguments.use_megatron_lm:
        yield "ACCELERATE_USE_MEGATRON_LM", "true"
        yield from _with_prefix(arguments, "megatron_lm_", "MEGATRON_LM_")
    if arguments.use_parallelism_config:
        yield "ACCELERATE_USE_PARALLELISM_CONFIG", "true"
        yield from _with_prefix(arguments, "parallelism_config_", "PARALLELISM_CONFIG_")


def _with_prefix(
    arguments: argparse.Namespace, prefix: str, theirs: str, leave: tuple[str, ...] = ()
) -> Iterator[tuple[str, str]]:
    """A variable for each option of a family that has a value, keys of a file that are no option among them."""
    known = [name for name in OPTIONS if name.startswith(prefix)]
    others = [name for name in vars(arguments) if name.startswith(prefix) and name not in OPTIONS]
    for name in (*known, *others):
        value = getattr(arguments, name, None)
        if value is not None and name not in leave:
            yield f"{theirs}{name.removeprefix(prefix).upper()}", _text(value)


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
