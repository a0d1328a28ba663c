"""Models that no process has whole: `deepspeed.zero.Init` shards each module as it is built."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from accel_checkpoint import capture_model, load_weights, on_each_rank
from accel_deepspeed import communication
from accel_deepspeed.engine_internals import cast_shard, is_shared_out
from accel_deepspeed.sharding import ZeroSharding

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn

    from accel_core import World


def build(
    factory: Callable[[], nn.Module], checkpoint: Path | None, config: Mapping[str, Any], world: World
) -> nn.Module:
    """The factory's model, each parameter shared out when its module has been built. A collective.

    Beside its parts, a rank has the parameters of one module at a time, in single precision. Their
    values are those of rank 0, or of the checkpoint, of which each rank reads its parts.

    Args:
        factory: the same on every rank.
        checkpoint: a file or folder with weights; None: those that the factory gives.
        config: of DeepSpeed; where parts are kept stands in it.
        world: the processes.

    Raises:
        CheckpointError, FileNotFoundError: on every rank, if the checkpoint does not fit, or cannot
            be read.
    """
    communication.start(world)
    from deepspeed import zero

    with communication.environment_of(world), zero.Init(config_dict_or_path=dict(config)):
        model = factory()
    if checkpoint is not None:
        state = capture_model(model, ZeroSharding())
        on_each_rank(world, "for weights to be read", lambda: load_weights(state, checkpoint, type(model).__name__))
    return model


def cast(model: nn.Module, dtype: torch.dtype) -> None:
    """Gives the parts of a model that is shared out another dtype, in place."""
    for parameter in model.parameters():
        if is_shared_out(parameter) and parameter.is_floating_point():
            cast_shard(parameter, dtype)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_floating_point():
                setattr(module, name, buffer.to(dtype))


def is_built(model: nn.Module) -> bool:
    """Whether a model was built by `build`: its parameters are shared out."""
    return any(map(is_shared_out, model.parameters()))
