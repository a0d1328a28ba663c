"""Optimizer state as entries of a neutral checkpoint.

A plain file knows parameters by number, in the order of the groups: they get the names of places,
"loose.<group>.<position>", and a load gives them those of the run's optimizer. Files of sharded
strategies know them by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

from accel_checkpoint import ELEMENTWISE, ForeignOptimizer, layouts_of
from accel_compat.checkpoints.distributed_files import distributed_parts, plain_values
from accel_compat.checkpoints.model_files import Parts, plain_name
from accel_compat.checkpoints.pickled_file import read_dict
from accel_core import CheckpointError
from accel_core.api.layouts import Elementwise, Entry, Replicated

_TORCH = "torch.optim"
_KNOWN = ("ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")
_NO_OPTIONS = {"params", "param_names"}
_OF_SCHEDULERS = {"base_momentum", "initial_lr", "max_lr", "max_momentum", "min_lr", "swa_lr"}


def open_optimizer(path: Path, number: int, asked: str | None) -> tuple[ForeignOptimizer, Parts]:
    """An optimizer, and what gives its entries; `asked` is its class, as the user names it."""
    if path.is_dir():
        return _distributed(path, number, asked)
    state = read_dict(path, "state", "param_groups")
    more = sorted(state.keys() - {"state", "param_groups"})
    if more:
        raise CheckpointError(
            f"{path} was to be read, but it has {more} besides 'state' and 'param_groups': its optimizer has a state_dict() of its own, "
            f"whose parts are not known. Load it by optimizer.load_state_dict() in a script."
        )
    groups = state["param_groups"]
    if not isinstance(state["state"], dict) or not _are_groups(groups):
        raise CheckpointError(f"{path} was to be read, but it is no state_dict() of an optimizer. Copy it again.")
    names = _names(groups, number)
    strangers = [key for key in state["state"] if key not in names]
    if strangers:
        raise CheckpointError(
            f"{path} was to be read, but it has state of the parameters {strangers[:8]!r}, which are in none of its groups. Copy it again."
        )
    entries, values = _entries({names[key]: kept for key, kept in state["state"].items()})
    return _foreign(groups, [[names[key] for key in group["params"]] for group in groups], values, asked), [
        lambda: {f"optimizer.{number}": entries}
    ]


def _distributed(path: Path, number: int, asked: str | None) -> tuple[ForeignOptimizer, Parts]:
    values = plain_values(path, "optimizer")
    options: dict[int, dict[str, Any]] = {}
    kept: dict[str, dict[str, Any]] = {}
    for keys, value in values.items():
        if keys[0] == "param_groups" and len(keys) == 3:
            options.setdefault(int(keys[1]), {})[str(keys[2])] = value
        elif keys[0] == "state" and len(keys) == 3:
            kept.setdefault(f"{number}.{plain_name(str(keys[1]))}", {})[str(keys[2])] = value
    groups = [options[key] for key in sorted(options)]
    if not _are_groups(groups):
        raise CheckpointError(f"{path} was to be read, but it has no groups of parameters. Copy it again.")

    def name(keys: Sequence[Any]) -> str | None:
        if keys[0] != "state" or len(keys) != 3:
            return None
        return f"optimizer.{number}/{number}.{plain_name(str(keys[1]))}/{keys[2]}"

    names = [[f"{number}.{plain_name(str(each))}" for each in group["params"]] for group in groups]
    return _foreign(groups, names, kept, asked), distributed_parts(path, "optimizer", name)


def _are_groups(groups: Any) -> bool:
    return (
        isinstance(groups, list)
        and bool(groups)
        and all(isinstance(group, dict) and isinstance(group.get("params"), list) for group in groups)
    )


def _names(groups: Sequence[Mapping[str, Any]], number: int) -> dict[Any, str]:
    """The name of each parameter by its key in a file: a number, or a name."""
    return {
        key: f"{number}.{plain_name(key)}" if isinstance(key, str) else f"loose.{place}.{position}"
        for place, group in enumerate(groups)
        for position, key in enumerate(group["params"])
    }


def _foreign(
    groups: Sequence[Mapping[str, Any]],
    names: Sequence[Sequence[str]],
    values: Mapping[str, Mapping[str, Any]],
    asked: str | None,
) -> ForeignOptimizer:
    plain = [{key: value for key, value in group.items() if key not in _NO_OPTIONS} for group in groups]
    module, _, name = (asked or "").replace(":", ".").rpartition(".")
    kind = f"{module or _TORCH}:{name}" if name else _recognised(plain)
    return ForeignOptimizer(
        kind, [{**group, "names": list(own)} for group, own in zip(plain, names, strict=True)], values
    )


def _entries(state: Mapping[str, Mapping[str, Any]]) -> tuple[dict[str, Entry], dict[str, dict[str, Any]]]:
    """Tensors as entries, by parameter and key, and the other values by parameter."""
    entries: dict[str, Entry] = {}
    values: dict[str, dict[str, Any]] = {}
    for name, kept in state.items():
        for key, value in kept.items():
            if key == "step" and type(value) in (int, float):  # torch before 1.12
                value = torch.tensor(float(value))
            if isinstance(value, torch.Tensor):
                laid_out = key in _laid_out() and value.dim() > 0
                entries[f"{name}/{key}"] = Elementwise.whole(value) if laid_out else Replicated(value)
            else:
                values.setdefault(name, {})[key] = value
    return entries, values


def _recognised(groups: Sequence[Mapping[str, Any]]) -> str:
    """The class of torch's that has these options, and no other does; else empty."""
    found = [name for name in _KNOWN if all(_fits(_made(name).param_groups[0], group) for group in groups)]
    return f"{_TORCH}:{found[0]}" if len(found) == 1 else ""


def _fits(defaults: Mapping[str, Any], group: Mapping[str, Any]) -> bool:
    if group.keys() - _OF_SCHEDULERS != defaults.keys() - _NO_OPTIONS:
        return False
    decoupled = "decoupled_weight_decay"  # by which Adam and AdamW differ
    return bool(defaults.get(decoupled) == group.get(decoupled) or "momentum_decay" in defaults or "eta" in defaults)


@cache
def _made(name: str) -> torch.optim.Optimizer:
    made: torch.optim.Optimizer = getattr(torch.optim, name)([torch.zeros(1)])
    return made


@cache
def _laid_out() -> frozenset[str]:
    """Keys whose tensors have an element for each of the parameter's."""
    layouts = [layouts_of(_made(name)) for name in _KNOWN]
    return frozenset(key for each in layouts for key, layout in each.items() if layout == ELEMENTWISE)
