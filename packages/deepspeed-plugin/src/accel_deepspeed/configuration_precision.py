"""The sections of a configuration that speak of dtypes, against the precision of the Accelerator.

DeepSpeed knows one form of mixed precision that the core has not: parameters in bfloat16 beside
masters in float32. The section `bf16` asks for it. Everything else about dtypes the core does: it
computes in lower precision by autocast, inside of DeepSpeed's engine, and scales losses.

Parameters in float16 are refused. The loss scaler divides gradients where they are kept, which is
in float16 then, and what falls below 6e-8 would be lost: what scaling is there to prevent.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from accel_core import PrecisionPolicy

_DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
)
_LONG_NAMES: Mapping[str, torch.dtype] = MappingProxyType(
    {
        **_DTYPES,
        "float32": torch.float32,
        "float": torch.float32,
        "float16": torch.float16,
        "half": torch.float16,
        "bfloat16": torch.bfloat16,
    }
)

_SCALER: Mapping[str, object] = MappingProxyType(
    {
        "loss_scale": 0,
        "initial_scale_power": 16,
        "loss_scale_window": 1000,
        "hysteresis": 2,
        "consecutive_hysteresis": False,
        "min_loss_scale": 1,
    }
)
"""DeepSpeed's loss scaling, by its own defaults."""

_CASTS: Mapping[str, str] = MappingProxyType(
    {
        "auto_cast": "the Accelerator computes by autocast, which casts what reaches each operation",
        "fp16_master_weights_and_grads": "parameters stay as they are, and masters and gradients in float16 would lose what is small",
    }
)
"""Switches of DeepSpeed's own float16, and why they have no place beside autocast."""


def settle_precision(
    values: dict[str, Any], source: str, stage: int, policy: PrecisionPolicy, parameter_dtype: torch.dtype | None
) -> None:
    """Makes the sections agree with the precision, in place.

    Args:
        values: the configuration.
        source: how messages call it.
        stage: of ZeRO.
        policy: the dtypes that are to hold.
        parameter_dtype: that of the model's trained parameters, if they share one.

    Raises:
        ValueError: they contradict each other, or ask for what is not offered.
    """
    param = policy.param or parameter_dtype
    _settle_fp16(values, source, policy, param)
    _settle_bf16(values, source, stage, policy, param)
    _settle_autocast(values, source, policy)
    _settle_communication(values, source, policy)
    _check_accumulation(values, source, stage)


def _settle_bf16(
    values: dict[str, Any], source: str, stage: int, policy: PrecisionPolicy, param: torch.dtype | None
) -> None:
    section = values.pop("bf16", {})
    needed, computes = param is torch.bfloat16, policy.compute is torch.bfloat16
    found = section.get("enabled", "auto" if needed else False)
    enabled = (needed or (computes and stage > 0)) if found == "auto" else bool(found)
    if enabled and not (needed or computes):
        raise ValueError(
            f"{source} has 'bf16.enabled' with true, but the precision is: {policy}. Write "
            f"Accelerator(mixed_precision='bf16'), or \"auto\" in the configuration."
        )
    if needed and not enabled:
        raise ValueError(
            f"{source} has 'bf16.enabled' with false, but parameters are in bfloat16 ({policy}), which DeepSpeed takes with "
            f'true alone. Write "auto".'
        )
    if enabled and stage == 0:
        raise ValueError(
            "ZeRO stage 0 was asked for with parameters in bfloat16, where DeepSpeed's first steps have a wrong size. Write "
            "zero_stage=1; or Accelerator(mixed_precision='bf16') without 'bf16.enabled', which leaves parameters as they are."
        )
    if enabled:
        # Where DeepSpeed left a step out by itself, schedulers would step all the same.
        values["bf16"] = {"check_grad_overflow": False, **section, "enabled": True}


def _settle_fp16(values: dict[str, Any], source: str, policy: PrecisionPolicy, param: torch.dtype | None) -> None:
    section = values.pop("fp16", {})
    enabled = section.get("enabled", False)
    if param is torch.float16 or (enabled and enabled != "auto"):
        found = f"{source} has 'fp16.enabled' with true" if enabled else f"Parameters are in float16 ({policy})"
        raise ValueError(
            f"{found}, and gradients of parameters in float16 lose what is small when the loss scale is taken out of them. Write "
            f'Accelerator(mixed_precision=\'fp16\') with parameters in float32 and "fp16": {{"enabled": "auto"}}, which '
            f"computes in float16; or mixed_precision='bf16'."
        )
    changed = [name for name, own in _SCALER.items() if section.get(name, own) not in (own, "auto")]
    if enabled and changed and policy.compute is torch.float16:
        raise ValueError(
            f"{source} has 'fp16' with {', '.join(f'{name} {section[name]}' for name in changed)}, but the Accelerator scales "
            f"losses. Write Accelerator(kwargs_handlers=[GradScalerKwargs(init_scale=2.0**16, growth_interval=1000)]) with "
            f"values of your own, and leave these keys out."
        )
    if enabled and policy.compute is torch.float16:
        _check_fp16_casts(section, source)


def _check_fp16_casts(section: Mapping[str, Any], source: str) -> None:
    for name, why in _CASTS.items():
        if section.get(name, False) not in (False, "auto"):
            raise ValueError(f"{source} has 'fp16.{name}', but {why}. Take it out.")


def _settle_autocast(values: dict[str, Any], source: str, policy: PrecisionPolicy) -> None:
    section = values.pop("torch_autocast", {})
    if not section.get("enabled"):
        return
    name = str(section.get("dtype") or "").removeprefix("torch.")
    if policy.compute is None or (name and _LONG_NAMES.get(name) is not policy.compute):
        if section["enabled"] == "auto":
            return  # it is off
        raise ValueError(
            f"{source} has 'torch_autocast' with {name or 'no dtype'}, but the precision is: {policy}. Write "
            f"Accelerator(mixed_precision='bf16'), which computes by autocast, and take the section out."
        )
    if section.get("lower_precision_safe_modules"):
        raise ValueError(
            f"{source} has 'torch_autocast.lower_precision_safe_modules', but the Accelerator computes by autocast, and torch "
            f"chooses the operations. Take it out; `with accelerator.autocast(AutocastKwargs(enabled=False)):` leaves a part in "
            f"full precision."
        )


def _settle_communication(values: dict[str, Any], source: str, policy: PrecisionPolicy) -> None:
    name = values.pop("communication_data_type", None)
    if name not in (None, "auto"):
        dtype = _DTYPES.get(str(name).lower())
        if dtype is None:
            raise ValueError(
                f"{source} has 'communication_data_type' with {name!r}; known are {', '.join(map(repr, _DTYPES))}."
            )
        if policy.reduce is not None and dtype is not policy.reduce:
            raise ValueError(
                f"{source} has 'communication_data_type' with {name!r}, but gradients are to travel in {policy.reduce} by the "
                f"precision. Keep one of them."
            )
        values["communication_data_type"] = str(name).lower()
    elif policy.reduce is not None:
        names = [name for name, dtype in _DTYPES.items() if dtype is policy.reduce]
        if not names:
            raise ValueError(
                f"Gradients are to travel in {policy.reduce} by the precision, and DeepSpeed has only "
                f"{', '.join(_DTYPES)}. Choose one of these as reduce_dtype."
            )
        values["communication_data_type"] = names[0]


def _check_accumulation(values: dict[str, Any], source: str, stage: int) -> None:
    dtype = values.get("data_types", {}).get("grad_accum_dtype")
    offloads = "offload_optimizer" in values["zero_optimization"]
    if "bf16" in values and stage == 1 and not offloads and _LONG_NAMES.get(str(dtype)) is torch.float32:
        raise ValueError(
            f"{source} has 'data_types.grad_accum_dtype' with {dtype!r} at stage 1, for which DeepSpeed takes another optimizer, "
            f"that keeps gradients in other places. Write zero_stage=2, or leave the key out."
        )
