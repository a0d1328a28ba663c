"""Optimizers that were built before their model's parameters were replaced get the new ones, in place and by name.

Sharding replaces parameters, and so do some conversions. An optimizer that was built before would
go on with dead tensors, and train nothing without a word.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.optim import Optimizer

MoveState = Callable[["torch.Tensor", "torch.Tensor", dict[str, Any]], dict[str, Any]]
"""`move(old, new, state)` gives the state of a parameter for its successor."""


class ParameterReplacement:
    """Remembers which optimizer holds which parameter of a model. Made before they are replaced.

    Args:
        model: its parameters keep their names.
        optimizers: those that may hold some of them.
    """

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        self._model = model
        self._optimizers = optimizers
        self._before = dict(model.named_parameters(remove_duplicate=False))

    def apply(self, move: MoveState | None = None) -> None:
        """Puts the present parameter of each name where the former one was: into `group["params"]`, and into `state`.

        Args:
            move: makes the state that an optimizer has of a parameter fit its successor; None: it
                stays where it is.
        """
        after = dict(self._model.named_parameters(remove_duplicate=False))
        successor = {
            id(old): (old, after[name])
            for name, old in self._before.items()
            if name in after and after[name] is not old
        }
        for optimizer in self._optimizers if successor else ():
            for group in optimizer.param_groups:
                group["params"][:] = [successor.get(id(each), (each, each))[1] for each in group["params"]]
            if move is not None:
                _move_state(optimizer, successor.values(), move)


def _move_state(optimizer: Optimizer, replaced: Any, move: MoveState) -> None:
    state: Any = optimizer.state
    for old, new in replaced:
        if state.get(old):
            state[new] = move(old, new, state[old])
            del state[old]
