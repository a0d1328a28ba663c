"""Functions over nested tuples, lists and mappings of tensors, in this process alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch


@dataclass
class TensorInformation:
    """The shape and dtype of a tensor."""

    shape: torch.Size
    dtype: torch.dtype


def is_torch_tensor(tensor: object) -> bool:
    """Whether this is a tensor."""
    return isinstance(tensor, torch.Tensor)


def is_tensor_information(tensor_info: object) -> bool:
    """Whether this is a `TensorInformation`."""
    return isinstance(tensor_info, TensorInformation)


def is_namedtuple(data: object) -> bool:
    """Whether this is an object of a named tuple's class."""
    return isinstance(data, tuple) and hasattr(data, "_asdict") and hasattr(data, "_fields")


def honor_type(obj: Any, generator: Iterable[Any]) -> Any:
    """The values in a container of the type of `obj`: a list, a tuple, or a named tuple."""
    return type(obj)(*generator) if is_namedtuple(obj) else type(obj)(generator)


def recursively_apply(
    func: Callable[..., Any],
    data: Any,
    *args: Any,
    test_type: Callable[[Any], bool] = is_torch_tensor,
    error_on_other_type: bool = False,
    **kwargs: Any,
) -> Any:
    """The same structure, with `func(leaf, *args, **kwargs)` for each leaf that `test_type` takes.

    Others stay as they are, or are a `TypeError` where `error_on_other_type`.
    """

    def applied(part: Any) -> Any:
        if isinstance(part, (tuple, list)):
            return honor_type(part, map(applied, part))
        if isinstance(part, Mapping):
            return type(part)({key: applied(value) for key, value in part.items()})  # type: ignore[call-arg]
        if test_type(part):
            return func(part, *args, **kwargs)
        if error_on_other_type:
            raise TypeError(
                f"{getattr(func, '__name__', func)} was given a {type(part).__name__}, expected nested tuples, lists and dicts of "
                f"what {test_type.__name__} takes."
            )
        return part

    return applied(data)


def send_to_device(
    tensor: Any, device: Any, non_blocking: bool = False, skip_keys: str | Iterable[str] | None = None
) -> Any:
    """The same structure on a device: tensors, and whatever else has a method `to`; `skip_keys` of mappings stay."""
    skipped = {skip_keys} if isinstance(skip_keys, str) else set(skip_keys or ())

    def sent(part: Any) -> Any:
        if hasattr(part, "to"):
            try:
                return part.to(device, non_blocking=non_blocking)
            except TypeError:  # such as a `BatchEncoding`
                return part.to(device)
        if isinstance(part, (tuple, list)):
            return honor_type(part, map(sent, part))
        if isinstance(part, Mapping):
            return type(part)({key: value if key in skipped else sent(value) for key, value in part.items()})  # type: ignore[call-arg]
        return part

    return sent(tensor)


def get_data_structure(data: Any) -> Any:
    """The same structure, with the shape and dtype of each tensor in its place."""
    return recursively_apply(lambda tensor: TensorInformation(tensor.shape, tensor.dtype), data)


def get_shape(data: Any) -> Any:
    """The same structure, with the shape of each tensor, as a list, in its place."""
    return recursively_apply(lambda tensor: list(tensor.shape), data)


def initialize_tensors(data_structure: Any) -> Any:
    """Uninitialised tensors in the place of each `TensorInformation`."""

    def made(information: TensorInformation) -> torch.Tensor:
        return torch.empty(information.shape, dtype=information.dtype)

    return recursively_apply(made, data_structure, test_type=is_tensor_information)


def find_batch_size(data: Any) -> int:
    """The rows of the first tensor in the structure; `ValueError` in an empty one, `TypeError` for another leaf."""
    while not isinstance(data, torch.Tensor):
        if not isinstance(data, (tuple, list, Mapping)):
            raise TypeError(f"find_batch_size() was given a {type(data).__name__}, expected tensors.")
        if not data:
            raise ValueError(f"Cannot find the batch size in an empty {type(data).__name__}.")
        data = next(iter(data.values())) if isinstance(data, Mapping) else data[0]
    return data.shape[0]


def ignorant_find_batch_size(data: Any) -> int | None:
    """`find_batch_size`, or None where it raises."""
    try:
        return find_batch_size(data)
    except (ValueError, TypeError):
        return None


def listify(data: Any) -> Any:
    """The same structure, with lists of numbers in place of tensors."""
    return recursively_apply(lambda tensor: tensor.detach().tolist(), data)


def slice_tensors(
    data: Any,
    tensor_slice: slice,
    process_index: int | None = None,  # noqa: ARG001
    num_processes: int | None = None,  # noqa: ARG001
) -> Any:
    """The same structure, with each tensor cut along dim 0."""
    return recursively_apply(lambda tensor: tensor[tensor_slice], data)


def concatenate(data: Any, dim: int = 0) -> Any:
    """One structure of several of the same shape, with their tensors concatenated."""
    first = data[0]
    if isinstance(first, (tuple, list)):
        return honor_type(first, (concatenate(list(parts), dim) for parts in zip(*data, strict=True)))
    if isinstance(first, Mapping):
        return type(first)({key: concatenate([part[key] for part in data], dim) for key in first})  # type: ignore[call-arg]
    if isinstance(first, torch.Tensor):
        return torch.cat(list(data), dim=dim)
    if len(data) == 1:
        return first
    raise TypeError(f"concatenate() was given a {type(first).__name__}, expected tensors.")


def _is_low_precision(tensor: Any) -> bool:
    return getattr(tensor, "dtype", None) in (torch.float16, torch.bfloat16)


def convert_to_fp32(tensor: Any) -> Any:
    """The same structure, with float16 and bfloat16 tensors in float32."""
    return recursively_apply(lambda low: low.float(), tensor, test_type=_is_low_precision)


def find_device(data: Any) -> torch.device | None:
    """The device of the first tensor in the structure; None if there is none."""
    if isinstance(data, torch.Tensor):
        return data.device
    parts = data.values() if isinstance(data, Mapping) else data if isinstance(data, (tuple, list)) else ()
    return next((device for part in parts if (device := find_device(part)) is not None), None)
