"""The layout of parameters, masters and optimizer state under ZeRO, in the form that checkpoints use."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from accel_core.api.layouts import Box, Extent, flat_range
from accel_deepspeed.engine_internals import is_shared_out, shape_of, shard_memory, shard_of

if TYPE_CHECKING:
    from accel_deepspeed.model_engine import ModelEngine

Lookup = Callable[[torch.Tensor], "ModelEngine | None"]


class ZeroSharding:
    """A `Sharding` in which each rank has a flat range of each parameter.

    Args:
        engine_of: gives the engine that steps a parameter; None of one that nobody steps here.
    """

    def __init__(self, engine_of: Lookup) -> None:
        self._engine_of = engine_of

    def extent(self, parameter: torch.Tensor) -> Extent:
        """The range of `parameter` on this rank; all of one that is not shared out."""
        shape, engine = shape_of(parameter), self._engine_of(parameter)
        if engine is not None:
            fragment = engine.fragments[id(parameter)]
            return Extent(shape, tuple(flat_range(shape, fragment.start, fragment.start + fragment.numel)))
        if is_shared_out(parameter):
            start, numel = shard_of(parameter)
            return Extent(shape, tuple(flat_range(shape, start, start + numel)))
        return Extent(shape, (Box.whole(shape),))

    def local(self, value: torch.Tensor) -> torch.Tensor:
        """The master of a parameter that is stepped, else its own memory; state is local already."""
        engine = self._engine_of(value)
        if engine is not None:
            return engine.master(value)
        if is_shared_out(value):
            return shard_memory(value).detach()[: shard_of(value)[1]]
        return value.detach()

    def like(self, parameter: torch.Tensor, local: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        """The local tensor itself."""
        return local

    def empty(self, parameter: torch.Tensor, key: str, dtype: torch.dtype) -> torch.Tensor:
        """A view of the flat memory that the optimizer will step with."""
        engine = self._engine_of(parameter)
        if engine is None:
            return torch.empty_like(self.local(parameter), dtype=dtype)
        return engine.state_memory(parameter, key, dtype)

    def versioned(self, value: torch.Tensor) -> bool:
        """False of what DeepSpeed steps: it writes through `.data`, which counts no versions."""
        stepped = self._engine_of(value) is not None or is_shared_out(value)
        return not stepped and type(value) in (torch.Tensor, torch.nn.Parameter)
