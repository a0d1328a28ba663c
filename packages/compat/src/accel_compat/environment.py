"""Accelerate's variables of the environment, as what its Accelerator takes as arguments."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, TypeVar

from accel_compat.plugins import (
    DeepSpeedPlugin,
    DynamoBackend,
    FullyShardedDataParallelPlugin,
    MegatronLMPlugin,
    ParallelismConfig,
    TorchDynamoPlugin,
)
from accel_compat.plugins.variables import fields_from, flag

if TYPE_CHECKING:
    from collections.abc import Mapping

Plugin = TypeVar("Plugin")


class Environment(NamedTuple):
    """What variables say; None: nothing."""

    mixed_precision: str | None = None
    cpu: bool | None = None
    gradient_accumulation_steps: int | None = None
    fsdp_plugin: FullyShardedDataParallelPlugin | None = None
    deepspeed_plugin: DeepSpeedPlugin | None = None
    megatron_lm_plugin: MegatronLMPlugin | None = None
    parallelism_config: ParallelismConfig | None = None
    dynamo_plugin: TorchDynamoPlugin | None = None
    debug: bool | None = None


def from_environment(environ: Mapping[str, str]) -> Environment:
    """The options that a launcher of Accelerate has set, read from `environ`."""

    def is_set(name: str) -> bool:
        return flag(environ.get(name, "no"))

    def text(name: str) -> str | None:
        return environ.get(name)

    steps, dynamo = text("ACCELERATE_GRADIENT_ACCUMULATION_STEPS"), text("ACCELERATE_DYNAMO_BACKEND")
    return Environment(
        mixed_precision=None
        if text("ACCELERATE_MIXED_PRECISION") is None
        else environ["ACCELERATE_MIXED_PRECISION"].lower(),
        cpu=True if is_set("ACCELERATE_USE_CPU") else None,
        gradient_accumulation_steps=int(steps) if steps is not None and steps.isdigit() else None,
        fsdp_plugin=_plugin(FullyShardedDataParallelPlugin, environ) if is_set("ACCELERATE_USE_FSDP") else None,
        deepspeed_plugin=_plugin(DeepSpeedPlugin, environ) if is_set("ACCELERATE_USE_DEEPSPEED") else None,
        megatron_lm_plugin=_plugin(MegatronLMPlugin, environ) if is_set("ACCELERATE_USE_MEGATRON_LM") else None,
        parallelism_config=_plugin(ParallelismConfig, environ) if is_set("ACCELERATE_USE_PARALLELISM_CONFIG") else None,
        dynamo_plugin=_plugin(TorchDynamoPlugin, environ)
        if dynamo is not None and DynamoBackend(dynamo) is not DynamoBackend.NO
        else None,
        debug=True if is_set("ACCELERATE_DEBUG_MODE") else None,
    )


def _plugin(kind: type[Plugin], environ: Mapping[str, str]) -> Plugin:
    return kind(**fields_from(kind, environ))
