"""The layout of DTensor parameters on the ranks, in the form that checkpoints use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from accel_checkpoint import Extent
from accel_core.api.layouts import Box
from accel_precision import plain_weight

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


class DTensorSharding:
    """A `Sharding` of parameters cut along any dims of any mesh; plain tensors are whole.

    A rank has one box of each parameter, or nothing where there are more ranks than rows. Replicas
    have equal boxes.
    """

    def extent(self, parameter: torch.Tensor) -> Extent:
        """The part of `parameter` on this rank. Raises `TypeError` for a sum over ranks."""
        shape = tuple(parameter.shape)
        if not is_sharded(parameter):
            return Extent(shape, (Box.whole(shape),))
        box = _box(parameter)
        found = tuple(self.local(parameter).shape)
        assert found == box.sizes, f"the local tensor has the shape {found}, its placements say {box.sizes}"
        return Extent(shape, () if box.is_empty else (box,))

    def local(self, value: torch.Tensor) -> torch.Tensor:
        """The local tensor of `value`, which is live, without its gradient history."""
        return plain_weight(local_of(value).detach())

    def like(self, parameter: Any, local: torch.Tensor) -> torch.Tensor:
        """`local` as a tensor that lies as `parameter` does."""
        if not is_sharded(parameter):
            return local
        from torch.distributed.tensor import DTensor

        return DTensor.from_local(
            local,
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )

    def empty(self, parameter: torch.Tensor, key: str, dtype: torch.dtype) -> torch.Tensor:  # noqa: ARG002
        """A new tensor."""
        return self.like(parameter, torch.empty_like(self.local(parameter), dtype=dtype))

    def versioned(self, value: torch.Tensor) -> bool:
        """Whether it is a plain tensor: what is changed inside of a DTensor raises no version."""
        return type(value) in (torch.Tensor, torch.nn.Parameter)


def is_sharded(tensor: torch.Tensor) -> Any:
    """Whether `tensor` is a DTensor, by its attributes: the class costs an import."""
    return hasattr(tensor, "placements")


@torch.no_grad()
def local_of(tensor: Any) -> torch.Tensor:
    """The memory behind a DTensor on this rank, and any other tensor as it is."""
    local: torch.Tensor = tensor.to_local() if is_sharded(tensor) else tensor
    return local


def _box(parameter: DTensor | Any) -> Box:
    """The part of the global shape: each mesh dim cuts what the ones before it have left.

    Where two mesh dims cut the same dim of a tensor, the one that was applied last is marked: a
    strided shard (FSDP, of what tensor parallelism had cut). It cuts the part of the other, so it
    comes second here, wherever it stands in the mesh.
    """
    offsets, sizes = [0] * parameter.dim(), list(parameter.shape)
    mesh = parameter.device_mesh
    coordinate = mesh.get_coordinate()
    assert coordinate is not None, "every rank is in the mesh"
    for number, placement in sorted(enumerate(parameter.placements), key=lambda each: _is_strided(each[1])):
        if placement.is_replicate():
            continue
        if placement.is_partial():
            raise TypeError(
                f"A parameter of shape {tuple(parameter.shape)} is a sum over ranks ({placement}), of which no rank has a part. Lay it "
                f"out with Shard or Replicate placements."
            )
        dim = placement.dim
        rows = -(-sizes[dim] // mesh.size(number))  # as torch.chunk cuts
        start = min(coordinate[number] * rows, sizes[dim])
        offsets[dim] += start
        sizes[dim] = min(rows, sizes[dim] - start)
    return Box(tuple(offsets), tuple(sizes))


def _is_strided(placement: Any) -> bool:
    return hasattr(placement, "split_factor")
