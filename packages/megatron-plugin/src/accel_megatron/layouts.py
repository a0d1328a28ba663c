"""Parts of parameters on a rank: their names in the whole model, their shapes there, their boxes.

Megatron-core declares them for its own checkpoints (`sharded_state_dict`); this reads that.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from accel_checkpoint import Extent
from accel_core.api.layouts import Box

if TYPE_CHECKING:
    import torch
    from torch import nn

_LAYER = re.compile(r"(?<=\.)layers\.\d+\.")
_EXPERT = re.compile(r"(local_experts\.|\.linear_fc\d\.(?:weight|bias))(\d+)")  # of a sequence, of a grouped layer


@dataclass(frozen=True)
class Part:
    """The part of a parameter on this rank.

    Args:
        name: in the whole model.
        local: in the stage.
        parameter: what is here, in the memory that training uses.
        extent: the whole shape, and the boxes in it, in the order of their memory.
    """

    name: str
    local: str
    parameter: nn.Parameter
    extent: Extent


def parts_of(chunk: nn.Module) -> Iterator[Part]:
    """The parts of all parameters of a stage, tied ones once. No collective."""
    declared = _declared(chunk) if hasattr(chunk, "sharded_state_dict") else {}
    for local, parameter in chunk.named_parameters():
        entry = declared.get(local)
        if entry is None:
            shape = tuple(parameter.shape)
            yield Part(local, local, parameter, Extent(shape, (Box.whole(shape),)))
        else:
            tensors = _flat(entry)
            boxes = [_box(each) for each in tensors]
            _check(local, parameter, [box for _, box in boxes])
            yield Part(_name(local, entry), local, parameter, Extent(boxes[0][0], tuple(box for _, box in boxes)))


def shares_experts(chunk: nn.Module) -> bool:
    """Whether this rank has some of the experts of a model, and others the rest: `expert_parallel` above 1."""
    return not all(getattr(each, "allreduce", True) for each in chunk.parameters())  # Megatron's mark of experts


def _declared(chunk: Any) -> dict[str, Any]:
    from megatron.core import parallel_state

    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    found: dict[str, Any] = chunk.sharded_state_dict(metadata={"non_homogeneous_layers": True, "dp_cp_group": group})
    return found


def _flat(entry: Any) -> Sequence[Any]:
    if not hasattr(entry, "build_fn"):
        return [entry]
    built = entry.build()  # a factory: one tensor here is several pieces of the whole, a gate and an up projection, say
    return list(built.values()) if isinstance(built, dict) else list(built)


def _box(tensor: Any) -> tuple[tuple[int, ...], Box]:
    """The whole shape, and the box of a tensor of Megatron's, without axes for layers or experts."""
    first = tensor.prepend_axis_num
    shape = tuple(tensor.global_shape[first:])
    return shape, Box(tuple(tensor.global_offset[first:]), tuple(tensor.local_shape))


def _name(local: str, entry: Any) -> str:
    """The name in the whole model: with its numbers of layers and experts, tied ones by their first.

    Megatron's keys are those of fused layers, whatever layers there are, and stack experts.
    """
    key = str(entry.key)
    if local.endswith("output_layer.weight") and key.endswith("word_embeddings.weight"):
        return key
    layer = _LAYER.search(key)
    name = local if layer is None else _LAYER.sub(layer[0], local, count=1)
    if _EXPERT.search(local) is None:
        return name
    first = _flat(entry)[0]
    return _EXPERT.sub(rf"\g<1>{first.global_offset[first.prepend_axis_num - 1]}", name, count=1)


def _check(local: str, parameter: torch.Tensor, boxes: Sequence[Box]) -> None:
    columns = {box.sizes[1:] for box in boxes}
    rows = sum(box.sizes[0] for box in boxes) if parameter.dim() else 1
    fits = sum(box.numel for box in boxes) == parameter.numel()
    if not fits or (len(boxes) > 1 and (len(columns) > 1 or rows != parameter.shape[0])):
        raise ValueError(
            f"The parameter {local!r} of shape {tuple(parameter.shape)} is declared by its sharded_state_dict as the boxes "
            f"{', '.join(map(str, boxes))}, which do not lie one after another in it. Cut it along its first dimension."
        )
