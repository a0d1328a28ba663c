"""The layout of parameters, masters and optimizer state under ZeRO, for checkpoints."""

from __future__ import annotations

import torch

from accel_checkpoint import Extent, flat_range
from accel_core.api.layouts import Box
from accel_deepspeed.engine_internals import is_shared_out, shape_of, shard_memory, shard_of
from accel_deepspeed.model_engine import engine_that_steps


class ZeroSharding:
    """A `Sharding`: each rank has a flat range of each parameter that is stepped or sharded."""

    def extent(self, parameter: torch.Tensor) -> Extent:
        """The range of `parameter` on this rank; all of one that is not shared out."""
        shape, engine = shape_of(parameter), engine_that_steps(parameter)
        if engine is not None:
            fragment = engine.fragments[id(parameter)]
            return Extent(shape, tuple(flat_range(shape, fragment.start, fragment.start + fragment.numel)))
        if is_shared_out(parameter):
            start, numel = shard_of(parameter)
            return Extent(shape, tuple(flat_range(shape, start, start + numel)))
        return Extent(shape, (Box.whole(shape),))

    def local(self, value: torch.Tensor) -> torch.Tensor:
        """The master of a stepped parameter, else its memory here; state is local already."""
        engine = engine_that_steps(value)
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
        engine = engine_that_steps(parameter)
        if engine is None or engine.state is None:
            return torch.empty_like(self.local(parameter), dtype=dtype)
        return engine.state.memory(parameter, key, dtype)

    def versioned(self, value: torch.Tensor) -> bool:
        """False of what DeepSpeed steps: it writes through `.data`, which counts no versions."""
        stepped = engine_that_steps(value) is not None or is_shared_out(value)
        return not stepped and type(value) in (torch.Tensor, torch.nn.Parameter)
