"""The optimizer for DeepSpeed: the user's class and options, over the parameters of one model.

ZeRO takes the parameters out of the groups of the optimizer that it is given, and puts flat
partitions in. The user's own keeps the user's parameters, by which everything else knows it: gates,
schedulers, checkpoints. So DeepSpeed gets a double. Before each step the options are copied, and
behind it they are copied back, for some optimizers count in their groups.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from accel_core.api.strategy import is_fused

if TYPE_CHECKING:
    from torch.optim import Optimizer

_SHAPE, _CUT = (3, 4), 5
_STEPS = 2
_RATE = 0.1
_COMPILED = "ds_opt_"  # names of DeepSpeed's, behind which C++ keeps an object for each number
_SHADOWED = ("step", "zero_grad", "add_param_group", "__reduce_ex__")  # on the instance, by gates and schedulers


def double_of(optimizer: Optimizer, parameters: Collection[nn.Parameter]) -> tuple[Optimizer, list[dict[str, Any]]]:
    """An optimizer of the same class over its trained parameters among `parameters`.

    Its constructor is not called again, for nobody knows the arguments that it was given.

    Returns:
        The double, and the groups of `optimizer` that its groups stand for, in its order; groups
        without such a parameter are left out.
    """
    wanted = {id(each) for each in parameters if each.requires_grad}
    sources, groups = [], []
    for group in optimizer.param_groups:
        held = [each for each in group["params"] if id(each) in wanted]
        if held:
            sources.append(group)
            groups.append({**group, "params": held})
    return _again(optimizer, groups), sources


def copy_options(sources: Sequence[dict[str, Any]], double: Optimizer) -> None:
    """Gives the groups of a double the present options of the groups that they stand for."""
    for source, group in zip(sources, double.param_groups, strict=True):
        group.update({key: value for key, value in source.items() if key != "params"})


def take_options(sources: Sequence[dict[str, Any]], double: Optimizer) -> None:
    """Gives these groups the options that a step of the double has changed."""
    for source, group in zip(sources, double.param_groups, strict=True):
        source.update({key: group[key] for key in source if key != "params"})


def check(optimizer: Optimizer, offloads: bool = False) -> None:
    """Raises if an optimizer finds other values for parameters laid flat and cut, as in ZeRO.

    No list says which do: a copy steps a small parameter, and two more step the same one in two
    flat parts, as two ranks. It takes milliseconds; the real parameters and the random streams stay
    as they are. `offloads`: whether the masters will be in the memory of the host.

    Raises:
        ValueError: saying what happened.
    """
    name = type(optimizer).__name__
    advice = (
        "Under ZeRO an optimizer steps flat parts of all parameters laid end to end. Use one that treats each element by itself, such as "
        "torch.optim.AdamW, or strategy='ddp'."
    )
    if is_fused(optimizer):
        raise ValueError(
            f"{name} was prepared under DeepSpeed, but it steps each parameter during the backward, before gradients have travelled. {advice}"
        )
    device = torch.device("cpu") if offloads else optimizer.param_groups[0]["params"][0].device
    whole = torch.linspace(-1, 1, 12, device=device)
    try:
        with torch.random.fork_rng([] if device.type == "cpu" else [device], device_type=device.type):
            expected = _tried(optimizer, [whole.view(_SHAPE)])
            found = torch.cat([_tried(optimizer, [part]) for part in (whole[:_CUT], whole[_CUT:])])
    except Exception as error:
        raise ValueError(
            f"{name} was prepared under DeepSpeed, but a copy of it failed at a flat part of a parameter: {type(error).__name__}: {error}. "
            f"{advice}"
        ) from error
    if not torch.allclose(found, expected, rtol=1e-4, atol=1e-6):
        raise ValueError(
            f"{name} was prepared under DeepSpeed, but at flat parts of a parameter it finds other values than at the whole: it looks at more "
            f"than one element at a time. {advice}"
        )


def declare_layouts(optimizer: Optimizer) -> None:
    """Tells checkpoints how state of DeepSpeed's own optimizers is laid out, so that any world reads it."""
    if type(optimizer).__module__.startswith("deepspeed.ops."):
        elementwise = dict.fromkeys(("exp_avg", "exp_avg_sq", "sum"), "elementwise")
        vars(optimizer).setdefault("accel_layouts", {**elementwise, "step": "replicated"})


def _tried(optimizer: Optimizer, values: Sequence[torch.Tensor]) -> torch.Tensor:
    """The values after some steps of a copy of an optimizer, flat."""
    parts = [nn.Parameter(value.clone()) for value in values]
    options = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
    trial = _again(optimizer, [{**copy.deepcopy(options), "params": parts, "lr": _RATE}])
    for number in range(_STEPS):
        for part in parts:
            part.grad = (part.detach() * (number + 1)).cos()
        trial.step()
    return torch.cat([part.detach().reshape(-1) for part in parts])


def _again(optimizer: Optimizer, groups: list[dict[str, Any]]) -> Optimizer:
    """A new optimizer with another's attributes, without hooks and additions to the instance."""
    kind = type(optimizer)
    double: Optimizer = kind.__new__(kind)
    own = {name: value for name, value in vars(optimizer).items() if not _is_of_others(name)}
    vars(double).update({name: _Lent(value) if name.startswith(_COMPILED) else value for name, value in own.items()})
    double.__setstate__({"state": defaultdict(dict), "param_groups": groups, "defaults": dict(optimizer.defaults)})
    return double


class _Lent:
    """The operator of a compiled optimizer, for a double: its end does not destroy what both use."""

    def __init__(self, operator: Any) -> None:
        self._operator = operator

    def __getattr__(self, name: str) -> Any:
        return _keep if name.startswith("destroy_") else getattr(self._operator, name)


def _keep(*_: Any) -> None:
    """The optimizer of the user's destroys it."""


def _is_of_others(name: str) -> bool:
    return name in _SHADOWED or name.startswith("_accel_") or name.endswith("_hooks")
