"""Megatron's random streams: of layers that are shared out, each rank has its own beside torch's.

Ranks that have one layer together draw alike where they hold the same activations, and differently
where each has a part of them (`get_cuda_rng_tracker`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from accel_core.api.component import derive_seed

if TYPE_CHECKING:
    from accel_core import World


def begin(world: World, number: int, *, alike: bool = False) -> None:
    """Begins all streams anew, torch's of the device too, from the seed of rank 0 and a number. A collective.

    Stages of a pipeline draw differently, and replicas too unless they are to be `alike`: for the
    weights of a model.
    """
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    told = torch.tensor([derive_seed(torch.initial_seed(), number) % 2**31], device=world.device)
    if world.size > 1:
        dist.broadcast(told, src=0)
    stage, replica = parallel_state.get_pipeline_model_parallel_rank(), parallel_state.get_data_parallel_rank()
    seed = derive_seed(int(told), stage, 0 if alike else replica + 1) % 2**31
    model_parallel_cuda_manual_seed(seed, force_reset_rng=True)


def capture() -> dict[str, Any] | None:
    """The streams of this rank, and its place; None if none were begun."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    states = get_cuda_rng_tracker().get_states()
    return {"place": _place(), "states": dict(states)} if states else None


def restore(state: Mapping[str, Any] | None, world: World, step: int) -> None:
    """Takes over streams, or begins them anew if a rank has those of another place. A collective."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    tracker = get_cuda_rng_tracker()
    if not tracker.get_states():
        return
    fits = torch.tensor([int(state is not None and state["place"] == _place())], device=world.device)
    if world.size > 1:
        dist.all_reduce(fits, dist.ReduceOp.MIN)
    if state is not None and bool(fits):
        tracker.set_states(dict(state["states"]))
    else:
        begin(world, step + 1)


def _place() -> list[int]:
    from megatron.core import parallel_state

    return [
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_pipeline_model_parallel_world_size(),
        parallel_state.get_pipeline_model_parallel_rank(),
        parallel_state.get_expert_model_parallel_world_size(),
        parallel_state.get_expert_model_parallel_rank(),
        parallel_state.get_context_parallel_world_size(),
        parallel_state.get_context_parallel_rank(),
        parallel_state.get_data_parallel_world_size(),
        parallel_state.get_data_parallel_rank(),
    ]
