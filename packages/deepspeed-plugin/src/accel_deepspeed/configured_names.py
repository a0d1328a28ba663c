"""The optimizers and schedulers that a configuration may name, and what each takes."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from torch import optim

from accel_core.api.component import nearest


def _options(names: str) -> frozenset[str]:
    return frozenset(names.split())


_ADAM = _options("lr betas eps weight_decay amsgrad bias_correction adam_w_mode torch_adam fp32_optimizer_states")

OPTIMIZERS: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "adam": _ADAM | _options("foreach maximize capturable differentiable fused"),
        "adamw": _ADAM | _options("foreach maximize capturable differentiable fused"),
        "adagrad": _options(
            "lr eps weight_decay amsgrad fp32_optimizer_states lr_decay initial_accumulator_value foreach maximize "
            "differentiable fused"
        ),
        "lamb": _options("lr bias_correction betas eps eps_inside_sqrt weight_decay max_coeff min_coeff amsgrad"),
        "lion": _options("lr betas weight_decay set_grad_none fp32_optimizer_states"),
    }
)
"""What DeepSpeed has classes of its own for, in lower case. Other names are those of torch.optim, with their case."""

_NOT_OFFERED: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(
            ("muadam", "muadamw", "musgd"), "Build it in the script, by mup's own class, and take the section out"
        ),
        "muon": "It orthogonalises whole matrices inside DeepSpeed's step, which is not offered here; choose another",
        "onebitadam": 'DeepSpeed has removed it; choose "AdamW"',
        "onebitlamb": 'DeepSpeed has removed it; choose "Lamb"',
        "zerooneadam": 'DeepSpeed has removed it; choose "AdamW"',
    }
)

_WARMUP = _options("warmup_min_lr warmup_max_lr warmup_num_steps warmup_type last_batch_iteration")

SCHEDULERS: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "LRRangeTest": _options(
            "lr_range_test_min_lr lr_range_test_step_size lr_range_test_step_rate lr_range_test_staircase last_batch_iteration"
        ),
        "OneCycle": _options(
            "cycle_min_lr cycle_max_lr decay_lr_rate cycle_first_step_size cycle_second_step_size cycle_first_stair_count "
            "cycle_second_stair_count decay_step_size cycle_momentum cycle_min_mom cycle_max_mom decay_mom_rate "
            "last_batch_iteration"
        ),
        "WarmupLR": _WARMUP,
        "WarmupDecayLR": _WARMUP | {"total_num_steps"},
        "WarmupCosineLR": _options(
            "total_num_steps warmup_min_ratio warmup_num_steps cos_min_ratio warmup_type last_batch_iteration"
        ),
    }
)
"""Schedules of DeepSpeed, by the names of their classes."""


def check_optimizer(section: Mapping[str, Any] | None, source: str) -> None:
    """Raises for an optimizer that is not known, and for options that it does not take.

    Raises:
        ValueError: with the nearest name, or what to do instead.
    """
    if section is None:
        return
    kind, params = _parts("optimizer", section, source)
    lowered = kind.lower()
    if lowered in _NOT_OFFERED:
        raise ValueError(f"{source} has 'optimizer.type' with {kind!r}, which is not offered. {_NOT_OFFERED[lowered]}.")
    known = OPTIMIZERS.get(lowered) or _torch_options(kind)
    if known is None:
        names = [*(name for name in _torch_names()), "Lamb", "Lion"]
        raise ValueError(_unknown("optimizer.type", kind, names, source))
    if "max_grad_norm" in params:
        raise ValueError(
            f"{source} has 'optimizer.params.max_grad_norm', which clips nothing. Write \"gradient_clipping\": "
            f"{params['max_grad_norm']} at the top."
        )
    _check_options("optimizer", kind, params, known, source)


def check_scheduler(section: Mapping[str, Any] | None, source: str) -> None:
    """Raises for a schedule that is not known, and for options that it does not take.

    Raises:
        ValueError: with the nearest name.
    """
    if section is None:
        return
    kind, params = _parts("scheduler", section, source)
    if kind not in SCHEDULERS:
        raise ValueError(_unknown("scheduler.type", kind, list(SCHEDULERS), source))
    _check_options("scheduler", kind, params, SCHEDULERS[kind], source)


def _parts(name: str, section: Mapping[str, Any], source: str) -> tuple[str, Mapping[str, Any]]:
    kind, params = section.get("type"), section.get("params", {})
    if not isinstance(kind, str) or kind == "auto":
        example = "AdamW" if name == "optimizer" else "WarmupLR"
        raise ValueError(f"{source} has '{name}.type' with {kind!r}. Write a name, such as \"{example}\".")
    if not isinstance(params, Mapping):
        raise TypeError(f"{source} has '{name}.params' with {params!r}, where a section of options is expected.")
    return kind, params


def _check_options(name: str, kind: str, params: Mapping[str, Any], known: frozenset[str], source: str) -> None:
    for option in params:
        if option not in known:
            raise ValueError(
                _unknown(f"{name}.params.{option}", option, sorted(known), source, f"{kind} has no such option")
            )


def _unknown(dotted: str, name: str, known: list[str], source: str, found: str = "nothing is called so") -> str:
    meant = nearest(name, known)
    advice = f"Did you mean {meant!r}?" if meant else f"Known are {', '.join(known)}."
    shown = f"has {dotted!r}" if dotted.endswith(name) else f"has {dotted!r} with {name!r}"
    return f"{source} {shown}, but {found}. {advice}"


def _torch_names() -> list[str]:
    return sorted(
        name
        for name, each in vars(optim).items()
        if isinstance(each, type) and issubclass(each, optim.Optimizer) and each is not optim.Optimizer
    )


def _torch_options(kind: str) -> frozenset[str] | None:
    if kind not in _torch_names():
        return None
    return frozenset(inspect.signature(getattr(optim, kind)).parameters) - {"params"}
