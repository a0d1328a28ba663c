"""The optimizer for Megatron's distributed optimizer: the user's class and options, over shards.

Megatron replaces the parameters in the groups of the optimizer that it is given by flat shards. The
user's own keeps the user's parameters, by which gates, schedulers and checkpoints know it. So
Megatron gets a double, and before each step the options are copied.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

_SHADOWED = ("step", "zero_grad", "add_param_group", "__reduce_ex__")  # on the instance, by gates and schedulers


def distributed(
    optimizer: Optimizer,
    parameters: Sequence[nn.Parameter],
    chunks: Sequence[Any],
    buffers: Mapping[int, Any],
    experts: bool,
) -> Any:
    """Megatron's distributed optimizer over the buffers of a model's stages.

    Raises:
        ValueError: for an optimizer whose class Megatron does not take.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core import parallel_state
        from megatron.core.optimizer.distrib_optimizer import Adam, DistributedOptimizer
        from megatron.core.optimizer.optimizer_config import OptimizerConfig
    if not isinstance(optimizer, (Adam, torch.optim.AdamW)):
        raise ValueError(
            f"{type(optimizer).__name__} was prepared under Megatron(distributed_optimizer=True), which steps Adam and AdamW alone. Use "
            f"torch.optim.AdamW, or distributed_optimizer=False."
        )
    wanted = set(map(id, parameters))
    groups = [
        {**group, "params": [each for each in group["params"] if id(each) in wanted]}
        for group in optimizer.param_groups
    ]
    if experts:
        group, gloo = (
            parallel_state.get_expert_data_parallel_group(),
            parallel_state.get_expert_data_parallel_group_gloo(),
        )
    else:
        group, gloo = (
            parallel_state.get_data_parallel_group(with_context_parallel=True),
            parallel_state.get_data_parallel_group_gloo(with_context_parallel=True),
        )
    config = OptimizerConfig(
        optimizer="adam",
        lr=1.0,
        bf16=any(each.dtype == torch.bfloat16 for each in parameters),
        use_distributed_optimizer=True,
    )
    return DistributedOptimizer(
        _again(optimizer, groups), config, None, None, list(chunks), dict(buffers), group, gloo, 0, 0
    )


def copy_options(optimizer: Optimizer, double: Optimizer) -> None:
    """Gives the groups of a double the present options of the user's."""
    for source, group in zip(optimizer.param_groups, double.param_groups, strict=True):
        for key, value in source.items():
            if key != "params":
                group[key] = value


def _again(optimizer: Optimizer, groups: list[dict[str, Any]]) -> Optimizer:
    """A new optimizer with another's attributes, without hooks and additions to the instance."""
    kind = type(optimizer)
    double: Optimizer = kind.__new__(kind)
    vars(double).update({name: value for name, value in vars(optimizer).items() if not _is_of_others(name)})
    double.__setstate__({"state": defaultdict(dict), "param_groups": groups, "defaults": dict(optimizer.defaults)})
    return double


def _is_of_others(name: str) -> bool:
    return name in _SHADOWED or name.startswith("_accel_") or name.endswith("_hooks")
