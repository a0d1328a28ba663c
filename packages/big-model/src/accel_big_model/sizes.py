"""Sizes of a model's modules in bytes, without any memory for them."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import nn

from accel_big_model.module_tensors import named_module_tensors

_UNITS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


def convert_file_size_to_int(size: int | str) -> int:
    """Bytes of a size in text: "10GiB" is 10 × 2³⁰, "10GB" is 10 × 10⁹; an int is bytes already.

    Raises `ValueError` for what is no size.
    """
    if isinstance(size, int):
        return size
    found = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([KMGT]?)(i?)B\s*", size, re.IGNORECASE)
    if found is None:
        raise ValueError(f"{size!r} is no size in bytes: write a whole number, or text such as '10GiB' or '500MB'.")
    number, unit, binary = found.groups()
    factor: int = (1024 if binary else 1000) ** _UNITS[unit.upper()]
    return math.floor(float(number) * factor)


def dtype_byte_size(dtype: torch.dtype | str) -> float:
    """Bytes of one element: 0.125 for bool, 0.5 for "int4", 1 for "fp8"; torch's names too."""
    if dtype == torch.bool:
        return 1 / 8
    if isinstance(dtype, torch.dtype):
        return dtype.itemsize
    bits = re.search(r"[^\d](\d+)(_\w+)?$", dtype)
    if bits is None:
        raise ValueError(
            f"{dtype!r} is no dtype: write one of torch's, or a name that ends in its bits, such as 'int4'."
        )
    return int(bits[1]) / 8


def compute_module_sizes(
    model: nn.Module,
    dtype: torch.dtype | str | None = None,
    special_dtypes: Mapping[str, torch.dtype | str] | None = None,
    buffers_only: bool = False,
) -> dict[str, int]:
    """Bytes of each module, parameter and buffer by name; "" is the model. Tied weights count once.

    Args:
        dtype: in which the model will be: floating tensors that are wider count as this one. None:
            as they are.
        special_dtypes: of single tensors, by their names.
        buffers_only: leaves parameters out.
    """
    special = special_dtypes or {}
    sizes: dict[str, int] = defaultdict(int)
    tensors: Iterable[tuple[str, torch.Tensor]] = (
        model.named_buffers() if buffers_only else named_module_tensors(model, recurse=True)
    )
    for name, tensor in tensors:
        size = int(tensor.numel() * _bytes_of(tensor.dtype, special.get(name), dtype))
        parts = name.split(".")
        for depth in range(len(parts) + 1):
            sizes[".".join(parts[:depth])] += size
    return dict(sizes)


def _bytes_of(own: torch.dtype, special: torch.dtype | str | None, dtype: torch.dtype | str | None) -> float:
    size = dtype_byte_size(own)
    if special is not None:
        return dtype_byte_size(special)
    return size if dtype is None or not own.is_floating_point else min(dtype_byte_size(dtype), size)


def get_max_layer_size(
    modules: Sequence[tuple[str, nn.Module | torch.Tensor]],
    module_sizes: Mapping[str, int],
    no_split_module_classes: Sequence[str],
) -> tuple[int, list[str]]:
    """The bytes of the largest layer among `modules`, and the names of those that are as large.

    A layer is a tensor, a module without children, or one whose class is not to be split.
    """
    largest, names = 0, []
    waiting = list(modules)
    while waiting:
        name, module = waiting.pop(0)
        if is_layer(module, no_split_module_classes):
            size = module_sizes.get(name, 0)
            if size > largest:
                largest, names = size, [name]
            elif size == largest:
                names.append(name)
        else:
            waiting = [(f"{name}.{child}", each) for child, each in module.named_children()] + waiting  # type: ignore[union-attr]
    return largest, names


def is_layer(module: nn.Module | torch.Tensor, no_split_module_classes: Sequence[str]) -> bool:
    """Whether it goes to one place as a whole."""
    return (
        isinstance(module, torch.Tensor)
        or not list(module.children())
        or type(module).__name__ in no_split_module_classes
    )


def calculate_maximum_sizes(model: nn.Module) -> tuple[int, tuple[int, list[str]]]:
    """The bytes of a model, and those of its largest layer with the names that are as large."""
    sizes = compute_module_sizes(model)
    no_split = getattr(model, "_no_split_modules", None) or []
    tensors = [item for item in named_module_tensors(model) if "." not in item[0]]
    return sizes.get("", 0), get_max_layer_size([*tensors, *model.named_children()], sizes, no_split)
