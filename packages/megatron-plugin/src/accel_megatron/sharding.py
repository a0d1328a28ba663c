"""The layout of parameters, masters and optimizer state under Megatron, for checkpoints."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from accel_checkpoint import Extent
from accel_core.api.layouts import Box
from accel_megatron.model_engine import engine_that_steps


class MegatronSharding:
    """A `Sharding`: of what is trained, the boxes that this rank steps; else what it has.

    Args:
        extents: by `id`, of parameters that no engine steps.
    """

    def __init__(self, extents: Mapping[int, Extent] | None = None) -> None:
        self._extents = extents or {}

    def extent(self, parameter: torch.Tensor) -> Extent:
        """The boxes of `parameter` on this rank."""
        engine = engine_that_steps(parameter)
        if engine is not None:
            return engine.extent(parameter)
        shape = tuple(parameter.shape)
        return self._extents.get(id(parameter), Extent(shape, (Box.whole(shape),)))

    def local(self, value: torch.Tensor) -> torch.Tensor:
        """The master of a stepped parameter, else the value, which is local; flat."""
        engine = engine_that_steps(value)
        local = value.detach() if engine is None else engine.master(value)
        return local.view(-1) if local.is_contiguous() else local

    def like(self, parameter: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
        """The local tensor, in the shape in which the optimizer keeps it."""
        engine = engine_that_steps(parameter)
        return local.view(parameter.shape) if engine is not None and not engine.shards else local

    def empty(self, parameter: torch.Tensor, key: str, dtype: torch.dtype) -> torch.Tensor:  # noqa: ARG002
        """New memory for state."""
        engine = engine_that_steps(parameter)
        like = parameter.detach() if engine is None else engine.master(parameter)
        return torch.empty_like(like, dtype=dtype)

    def versioned(self, value: torch.Tensor) -> bool:
        """False of what Megatron steps through `.data`, which counts no versions."""
        engine = engine_that_steps(value)
        return (engine is None or not engine.shards) and type(value) in (torch.Tensor, torch.nn.Parameter)
