"""Operations of all processes together, as functions: for code that has no `Accelerator`.

Each works in `World.current()`. A *collective* is called by every rank, in the same order; where
arguments do not fit together, all raise `CollectiveMismatchError`. A *tree* is a tensor, or nested
tuples, lists and mappings of strided tensors; another leaf is a `TypeError` on every rank.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from accel_core.collectives import objects, padding, random_sync, reduce_gather
from accel_core.collectives.broadcast import broadcast as broadcast_over
from accel_core.collectives.padding import pad_input_tensors
from accel_core.options.resolution import as_rng_types
from accel_core.processes.world import World

if TYPE_CHECKING:
    from accel_core.collectives.reduce_gather import Reduction

T = TypeVar("T")

__all__ = [
    "broadcast", "broadcast_object_list", "gather", "gather_object", "pad_across_processes", "pad_input_tensors",
    "reduce", "synchronize_rng_state", "synchronize_rng_states", "wait_for_everyone",
]  # fmt: skip


def gather(tensor: T) -> T:
    """Concatenates the tensors of all ranks along dim 0, in rank order. Collective.

    Takes a tree of one structure and equal dtypes; sizes may differ in dim 0 only, and a tensor
    without dimensions gives one element per rank. Returns the same structure, detached, each tensor
    on its device; in a world of one the tensors themselves.
    """
    return reduce_gather.gather(tensor, World.current())


def gather_object(object: Sequence[Any]) -> list[Any]:
    """Concatenates lists in rank order: `gather_object([value])` has one item per rank. Collective.

    Takes a list or tuple, of any length, of objects that can be pickled; tensors inside arrive on
    the CPU. `TypeError` on every rank for anything else. Where an object cannot be pickled, or
    unpickled (`UnpicklingError`), the other ranks raise `CollectiveMismatchError` with the reason.
    """
    return objects.gather_objects(object, World.current())


def reduce(tensor: T, reduction: Reduction, scale: float = 1.0) -> T:
    """Combines tensors over ranks: "sum", "mean", "max", times `scale`. Collective, "none" is not.

    Takes a tree of one structure, and of the same shapes, on all ranks, and returns the same,
    detached, equal on all ranks. Dtypes stay, but booleans are counted as int64, and the mean of
    integers and booleans, or their product with a scale, has the default floating dtype.
    "none" returns `tensor`; another reduction raises `ValueError` on every rank.
    """
    return reduce_gather.reduce_tree(tensor, World.current(), reduction, scale)


def broadcast(tensor: T, from_process: int = 0) -> T:
    """Gives every rank the tensors of one rank. Collective.

    Takes a tree of one structure, and of the same shapes and dtypes, on all ranks; elsewhere than
    on the source, meta tensors will do. Returns new tensors, detached, each on the device of the
    one given here (meta: the world's). `ValueError` on every rank for no such process.
    """
    return broadcast_over(tensor, World.current(), from_process)


def broadcast_object_list(object_list: list[Any], from_process: int = 0) -> list[Any]:
    """Replaces the items of every rank's list, in place, by one rank's; returns it. Collective.

    The lists have one length; the source's items can be pickled. `TypeError` on every rank for no
    list, `ValueError` for no such process, others as `gather_object`.
    """
    return objects.broadcast_object_list(object_list, World.current(), from_process)


def pad_across_processes(tensor: T, dim: int = 0, pad_index: complex = 0, pad_first: bool = False) -> T:
    """Pads each tensor along one dimension to the largest size that it has on any rank. Collective.

    Takes a tree of one structure, with equal numbers of dimensions; a tensor without `dim` stays as
    it is. `pad_index` goes behind the values or, with `pad_first`, before them. Gradients flow
    through. `ValueError` on every rank if a dtype cannot hold `pad_index`.
    """
    return padding.pad_across_processes(tensor, World.current(), dim, pad_index, pad_first)


def wait_for_everyone() -> None:
    """Waits until every rank has come here. Collective; does nothing in a world of one."""
    World.current().barrier()


def synchronize_rng_state(rng_type: str | None = None, generator: torch.Generator | None = None) -> None:
    """Sets one stream to its state on rank 0: see `synchronize_rng_states`. Collective.

    "generator" is the default if one is given, else "torch".
    """
    default = "torch" if generator is None else "generator"
    synchronize_rng_states([default if rng_type is None else rng_type], generator)


def synchronize_rng_states(rng_types: Sequence[str], generator: torch.Generator | None = None) -> None:
    """Sets random streams to their states on rank 0. One collective; none in a world of one.

    `rng_types`: "torch" for torch's global stream on the CPU, a device type for that of the device,
    "generator" for `generator`, changed in place. What has no effect here warns. Raises on every
    rank `TypeError` for no list of names, `ValueError` for an unknown name or a missing generator.
    """
    world = World.current()
    try:
        names = as_rng_types("rng_types", rng_types)
        if "generator" in names and generator is None:
            raise ValueError(
                "rng_types has 'generator', but no generator was given. Pass generator=torch.Generator(), the one that is "
                "to be the same everywhere, or leave the name out."
            )
    except (TypeError, ValueError) as error:
        reduce_gather.refuse(reduce_gather.channel_of(world, None), error)
    if generator is not None and "generator" not in names:
        warnings.warn(
            f"synchronize_rng_states() was given a generator, but rng_types={list(names)} leaves it alone. Add 'generator'.",
            stacklevel=2,
        )
    random_sync.synchronize_random_states(names, [] if generator is None else [generator], world)
