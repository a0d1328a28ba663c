"""What single processes do of a job that all share: each takes its part of the inputs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import Dataset, Subset

from accel_core.tree import rebuilt

if TYPE_CHECKING:
    from accel_core.world import World


@contextmanager
def split_between_processes(inputs: Any, world: World, apply_padding: bool = False) -> Iterator[Any]:
    """Gives each process its part of `inputs`: consecutive elements, the first `len(inputs) % size` ranks one more.

    No collective, so every process has to be given the same; with fewer elements than processes, parts are empty. `inputs`
    is never changed, and in a world of one it comes back as it is.

    Args:
        inputs: a list or another sequence, whose parts are lists; a tuple, named or not, whose parts are plain tuples; a
            tensor or an array, which are split along dim 0; a dataset with `select(indices)`, or one of torch's with a length,
            whose parts are `torch.utils.data.Subset`; or a mapping whose values are such, all of one length.
        world: the processes.
        apply_padding: whether shorter parts repeat the last element of `inputs`, so that all have one length.

    Raises:
        TypeError: for anything else, such as a string or a tensor without dimensions.
        ValueError: if the values of a mapping differ in length.
    """
    length = _length(inputs, "inputs")
    yield inputs if world.size == 1 else _part(inputs, _indices(length, world, apply_padding))


def _indices(length: int, world: World, apply_padding: bool) -> list[int]:
    """The elements that this process takes; what fills it up repeats the last one."""
    each, more = divmod(length, world.size)
    begin = world.rank * each + min(world.rank, more)
    own = list(range(begin, begin + each + (world.rank < more)))
    longest = each + (more > 0)
    return own + [length - 1] * (longest - len(own)) if apply_padding else own


def _length(inputs: Any, path: str) -> int:
    """How many elements there are to split. Raises for what cannot be split."""
    if isinstance(inputs, Mapping):
        lengths = {f"{path}[{key!r}]": _length(value, f"{path}[{key!r}]") for key, value in inputs.items()}
        if len(set(lengths.values())) > 1:
            found = ", ".join(f"{place} has {length}" for place, length in lengths.items())
            raise ValueError(
                f"split_between_processes() was given a {type(inputs).__name__} whose values differ in length: {found}. Give "
                f"all of them one element per input, or split them one by one."
            )
        return next(iter(lengths.values()), 0)
    if isinstance(inputs, torch.Tensor) and not inputs.dim():
        raise TypeError(
            f"split_between_processes() splits tensors along dim 0, and {path} is a tensor without dimensions. Pass one "
            f"element per input, or use the value as it is: every process has it."
        )
    if not _is_divisible(inputs):
        raise TypeError(
            f"split_between_processes() cannot split {path}, a {type(inputs).__name__}. It takes lists, tuples and other "
            f"sequences, tensors, arrays, datasets with a length, and dicts of these: wrap a single input as [input]."
        )
    return len(inputs)


def _is_divisible(inputs: Any) -> bool:
    if isinstance(inputs, (str, bytes, bytearray)) or not hasattr(inputs, "__len__"):
        return False  # the parts of a text are no texts that anybody means
    return isinstance(inputs, (Sequence, torch.Tensor, Dataset)) or _has_select(inputs) or _is_array(inputs)


def _part(inputs: Any, indices: list[int]) -> Any:
    if isinstance(inputs, Mapping):
        parts = {key: _part(value, indices) for key, value in inputs.items()}
        # One that cannot be changed need not know how to be made from a dict.
        return rebuilt(inputs, list(parts.values())) if isinstance(inputs, MutableMapping) else parts
    if isinstance(inputs, torch.Tensor):
        # Views where nothing is repeated: consecutive elements need no copy.
        whole = inputs[indices[0] : indices[-1] + 1] if indices else inputs[:0]
        return whole if len(whole) == len(indices) else inputs[indices]
    if _has_select(inputs):
        return inputs.select(indices)
    if isinstance(inputs, Dataset):
        return Subset(inputs, indices)
    if _is_array(inputs):
        return inputs.take(indices, axis=0)
    taken = [inputs[index] for index in indices]
    return tuple(taken) if isinstance(inputs, tuple) else taken


def _has_select(inputs: Any) -> bool:
    return not isinstance(inputs, torch.Tensor) and callable(getattr(inputs, "select", None))


def _is_array(inputs: Any) -> bool:
    """Arrays and data frames of other libraries."""
    return callable(getattr(inputs, "take", None)) and bool(getattr(inputs, "shape", ()))
