"""State of optimizers, and what a step needs in addition.

torch's optimizers, and a user's, step parameters of the real shapes on the meta device, twice: what
they keep is the state, what was alive at most in the second step is its need. `lion` and
`adamw8bit` are formulas, for torch has none of them:

    lion        one tensor in the dtype of the parameter; a step needs one of the largest parameter
    adamw8bit   two bytes an element and two fp32 scales per 256 elements; parameters of fewer
                than 4096 elements keep eight bytes an element, as in bitsandbytes
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

import torch
from torch import nn
from torch.optim import Optimizer

from accel_big_model.estimate.inputs import imported, unknown
from accel_big_model.estimate.tracking import LiveBytes

OptimizerMaker: TypeAlias = Callable[[list[nn.Parameter]], Optimizer]
"""A class of an optimizer, or a function of its parameters."""


class OptimizerCost(NamedTuple):
    """Bytes of an optimizer.

    Args:
        state: what it keeps from step to step.
        temporary: what a step needs at most beside that.
    """

    state: int
    temporary: int


_OF_TORCH: MappingProxyType[str, OptimizerMaker] = MappingProxyType(
    {
        "sgd": partial(torch.optim.SGD, lr=1e-3),
        "momentum": partial(torch.optim.SGD, lr=1e-3, momentum=0.9),
        "adam": torch.optim.Adam,
        "adamw": torch.optim.AdamW,
        "adafactor": torch.optim.Adafactor,
        "adagrad": torch.optim.Adagrad,
        "rmsprop": torch.optim.RMSprop,
    }
)
_BLOCK, _LEAST = 256, 4096  # of bitsandbytes: elements that share a scale; of a parameter with state in 8 bits

Shape: TypeAlias = tuple[int, ...]


def _lion(shapes: Sequence[Shape], dtype: torch.dtype) -> OptimizerCost:
    sizes = [math.prod(each) * dtype.itemsize for each in shapes]
    return OptimizerCost(sum(sizes), max(sizes, default=0))


def _adamw_8bit(shapes: Sequence[Shape], dtype: torch.dtype) -> OptimizerCost:  # noqa: ARG001
    sizes = map(math.prod, shapes)
    return OptimizerCost(sum(8 * n if n < _LEAST else 2 * n + 8 * math.ceil(n / _BLOCK) for n in sizes), 0)


_FORMULAS = MappingProxyType({"lion": _lion, "adamw8bit": _adamw_8bit})
OPTIMIZERS = (*_OF_TORCH, *_FORMULAS)


def check_optimizer(optimizer: str | OptimizerMaker) -> None:
    """Raises `ValueError` for a name that is none."""
    if isinstance(optimizer, str) and optimizer not in OPTIMIZERS:
        _imported(optimizer)


def cost_of(
    optimizer: str | OptimizerMaker, shapes: Sequence[Shape], dtype: torch.dtype, accelerator: bool
) -> OptimizerCost:
    """The bytes for parameters of these shapes.

    Args:
        optimizer: a name of `OPTIMIZERS`, "module:Class", a class, or a function of the parameters.
        shapes: of what a rank steps.
        dtype: of that.
        accelerator: steps take all parameters at once (`foreach`), where the optimizer offers it,
            as torch does there; otherwise one after the other.

    Raises:
        ValueError: the name is unknown, or it cannot step parameters without values.
    """
    if isinstance(optimizer, str) and optimizer in _FORMULAS:
        return _FORMULAS[optimizer](shapes, dtype)
    maker = optimizer if not isinstance(optimizer, str) else _OF_TORCH.get(optimizer) or _imported(optimizer)
    try:
        return _measured(maker, tuple(shapes), dtype, accelerator)
    except Exception as error:
        name = optimizer if isinstance(optimizer, str) else getattr(optimizer, "__name__", optimizer)
        raise ValueError(
            f"Optimizer {name!r} was to step parameters without values, to see what it keeps, and failed: {type(error).__name__}: "
            f"{error}. Choose the one that is most like it among {', '.join(OPTIMIZERS)}."
        ) from error


@lru_cache(maxsize=16)  # several strategies step the same shapes
def _measured(maker: OptimizerMaker, shapes: tuple[Shape, ...], dtype: torch.dtype, accelerator: bool) -> OptimizerCost:
    parameters = [nn.Parameter(torch.empty(each, dtype=dtype, device="meta")) for each in shapes]
    if not parameters:
        return OptimizerCost(0, 0)
    for each in parameters:
        each.grad = torch.empty_like(each)
    gradients = [each.grad for each in parameters if each.grad is not None]
    live = LiveBytes(left_out=[*parameters, *gradients], made_up=1)
    with live:
        made = maker(parameters)
        for group in made.param_groups:
            if "foreach" in group:
                group["foreach"] = accelerator
        made.step()
        live.begin_again()
        before = live.live
        made.step()
    return OptimizerCost(_state_bytes(made), live.peak - before)


def _state_bytes(optimizer: Optimizer) -> int:
    kept = {
        id(storage): storage.nbytes()
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
        for storage in [value.untyped_storage()]
    }
    return sum(kept.values())


def _imported(name: str) -> OptimizerMaker:
    if ":" not in name:
        raise unknown("Optimizer", name, OPTIMIZERS, ", and any class as module:Class, such as torch.optim:NAdam")
    found: OptimizerMaker = imported(name, "The optimizer", "module:Class")
    return found
