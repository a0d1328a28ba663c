"""What every strategy that keeps a model whole does with it before anything else."""

from __future__ import annotations

from typing import TYPE_CHECKING

from accel_core.compilation import compile_calls
from accel_core.precision import apply_policy

if TYPE_CHECKING:
    from torch import nn

    from accel_core.prepare import PrepareRequest


def place_model(model: nn.Module, request: PrepareRequest) -> None:
    """Moves, casts and compiles a model in place, as the request says; gradients and the rest are up to the strategy.

    `param`, `compute`, `output` and `input` of the policy hold from here on. `reduce` is the strategy's business.
    """
    if request.device is not None:
        model.to(request.device)
    apply_policy(model, request.policy, request.device_type)
    if request.compile_options is not None:
        compile_calls(model, request.compile_options)
