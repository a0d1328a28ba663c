"""`AcceleratedOptimizer`: the type of prepared optimizers, and a class for wrappers of engines."""

from __future__ import annotations

from typing import Any

import torch

import accel_core


class _Optimizers(type(torch.optim.Optimizer)):  # type: ignore[misc]
    def __instancecheck__(cls, instance: object) -> bool:
        if cls is AcceleratedOptimizer and isinstance(instance, accel_core.AcceleratedOptimizer):
            return True
        return bool(super().__instancecheck__(instance))

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if cls is AcceleratedOptimizer:  # called itself, it makes the optimizer one that is gated
            return answering(accel_core.AcceleratedOptimizer(*args, **kwargs))
        return super().__call__(*args, **kwargs)


class AcceleratedOptimizer(torch.optim.Optimizer, metaclass=_Optimizers):
    """The type of a prepared optimizer, which keeps its own class; a subclass wraps what an engine drives.

    Called, it is `accel_core.AcceleratedOptimizer`. Objects of subclasses have `optimizer`, and pass on.
    """

    def __init__(self, optimizer: Any, device_placement: bool = True, scaler: Any = None) -> None:
        # Not torch's constructor: groups and state are those of the optimizer inside.
        self.optimizer = optimizer
        self.scaler = scaler
        self.device_placement = device_placement

    state: Any = property(lambda self: self.optimizer.state)
    param_groups: Any = property(lambda self: self.optimizer.param_groups)
    defaults: Any = property(lambda self: self.optimizer.defaults)

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step changed nothing."""
        return bool(getattr(self.optimizer, "step_was_skipped", False))

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Steps the optimizer."""
        return self.optimizer.step(*args, **kwargs)

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Clears the gradients."""
        self.optimizer.zero_grad(*args, **kwargs)

    def state_dict(self) -> Any:
        """The state of the optimizer."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        """Restores the state of the optimizer."""
        self.optimizer.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds parameters to the optimizer."""
        self.optimizer.add_param_group(param_group)

    def __getstate__(self) -> dict[str, Any]:
        return dict(self.__dict__)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.optimizer!r})"


def _change_nothing() -> None:
    pass


def answering(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer, with `optimizer`: itself, for nothing is wrapped; `train` and `eval`, if it has none, do nothing."""
    vars(optimizer).setdefault("optimizer", optimizer)
    for name in ("train", "eval"):  # schedule-free optimizers have them
        if not hasattr(optimizer, name):
            setattr(optimizer, name, _change_nothing)
    return optimizer
