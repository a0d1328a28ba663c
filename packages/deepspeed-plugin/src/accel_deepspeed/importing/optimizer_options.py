"""Class and options of ZeRO's inner optimizer, unnamed in files: from options or configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from accel_core import CheckpointError

_CANDIDATES = ("ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")
_OF_SCHEDULERS = {"base_momentum", "initial_lr", "max_lr", "max_momentum", "min_lr", "swa_lr"}
_NOT_OPTIONS = {"params", "names", "param_names", "step"}
_TORCH = "torch.optim"


class Options(NamedTuple):
    """The class of an optimizer, "module:QualName", and the options of its groups."""

    kind: str
    groups: list[dict[str, Any]]


def options_of(groups: Sequence[Mapping[str, Any]], asked: str | None, configured: Mapping[str, Any]) -> Options:
    """The class and the options of an optimizer.

    Args:
        groups: its `param_groups`.
        asked: its class as the user names it: "torch.optim.AdamW".
        configured: the section "optimizer" of DeepSpeed's configuration.

    Raises:
        CheckpointError: if its class is not known, or computes what that class of torch's does not.
    """
    plain = [{key: value for key, value in group.items() if key not in _NOT_OPTIONS} for group in groups]
    module, _, name = (asked or "").replace(":", ".").rpartition(".")
    if asked and module not in {_TORCH, ""}:
        return Options(f"{module}:{name}", plain)
    name = name or _recognised(plain) or _configured(configured)
    if name not in _CANDIDATES:
        keys = sorted({key for group in plain for key in group} - _OF_SCHEDULERS)
        raise CheckpointError(
            f"The class of the optimizer is not in the checkpoint, and cannot be told by its options {keys}"
            + (f" or as {asked!r}" if asked else "")
            + f". Name it: --optimizer torch.optim.AdamW, or module.Class of one that is not torch's. Of torch's: {', '.join(_CANDIDATES)}."
        )
    return Options(f"{_TORCH}:{name}", [_translated(name, group) for group in plain])


def _recognised(groups: Sequence[Mapping[str, Any]]) -> str:
    """The optimizer of torch's that has these options, and no other does."""
    found = [name for name in _CANDIDATES if all(_fits(_defaults(name), group) for group in groups)]
    return found[0] if len(found) == 1 else ""


def _fits(defaults: Mapping[str, Any], group: Mapping[str, Any]) -> bool:
    if group.keys() - _OF_SCHEDULERS != defaults.keys():
        return False
    decoupled = "decoupled_weight_decay"  # by which Adam and AdamW differ
    return bool(defaults.get(decoupled) == group.get(decoupled) or "momentum_decay" in defaults or "eta" in defaults)


def _configured(section: Mapping[str, Any]) -> str:
    """The torch optimizer that a configuration means to DeepSpeed; empty if there is none."""
    kind, options = str(section.get("type", "")).lower(), section.get("params") or {}
    if kind == "adam":
        return "AdamW" if options.get("adam_w_mode", True) else "Adam"
    return {"adamw": "AdamW", "adagrad": "Adagrad", "sgd": "SGD"}.get(kind, "")


def _defaults(name: str) -> dict[str, Any]:
    made = getattr(torch.optim, name)([torch.zeros(1)])
    return {key: value for key, value in made.param_groups[0].items() if key not in _NOT_OPTIONS}


def _translated(name: str, group: Mapping[str, Any]) -> dict[str, Any]:
    """The options of one of torch's optimizers with the values of one of DeepSpeed's."""
    if group.get("bias_correction") is False:
        raise CheckpointError(
            f"The optimizer was to be imported as torch.optim.{name}, but it has bias_correction=False, which that has not. Pass the "
            f"module.Class of one that does the same: --optimizer."
        )
    defaults = _defaults(name)
    known = {key: value for key, value in group.items() if key in defaults or key in _OF_SCHEDULERS}
    return {**defaults, **known}
