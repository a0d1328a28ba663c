"""Encoding of NumPy arrays as tensors, and of scalars as bytes. NumPy need not be installed."""

from __future__ import annotations

import importlib
import re
import sys
from typing import Any

import torch

from accel_checkpoint.codec.path import Unfit, type_name
from accel_checkpoint.codec.special_types import Special, find_dtype, refusal

SHARED = {
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
}
"""The dtypes that NumPy and torch name alike."""

_DTYPE = re.compile(r"[<>|][biufc]\d+")


def numpy_special(value: Any) -> Special | None:
    """The encoding of a NumPy array or scalar of numbers; None if not NumPy's, else `Unfit`."""
    numpy: Any = sys.modules.get("numpy")
    if numpy is None or not isinstance(value, (numpy.ndarray, numpy.generic)):
        return None
    if isinstance(value, numpy.ndarray) and type(value) is not numpy.ndarray:
        raise Unfit(
            f"is a {type_name(type(value))}, and only arrays of NumPy's own class can be saved",
            "Give a plain array of the same content, as numpy.asarray makes it.",
        )
    if value.dtype.name not in SHARED or not value.dtype.isnative:
        kind = type_name(type(value))
        raise Unfit(
            f"is a {kind} of dtype {value.dtype}, which a checkpoint cannot hold",
            "Give a list, or an array of numbers of the usual kinds."
            if kind == "numpy.ndarray"
            else refusal(value).advice,
        )
    return ARRAY if isinstance(value, numpy.ndarray) else SCALAR


def _split_array(array: Any) -> tuple[str, torch.Tensor]:
    dtype = array.dtype
    strided = array.flags.writeable and all(stride >= 0 and stride % dtype.itemsize == 0 for stride in array.strides)
    return dtype.name, torch.from_numpy(array if strided else array.copy("C"))


def _join_array(name: str, data: torch.Tensor) -> Any:
    if name not in SHARED or data.dtype != find_dtype(name):
        raise ValueError(f"an array of {name!r:.40} is not kept as {data.dtype}")
    return data.detach().cpu().numpy()


def _join_scalar(name: str, content: str) -> Any:
    if not _DTYPE.fullmatch(name):
        raise ValueError(f"{name!r:.40} is no dtype of numbers")
    numpy: Any = importlib.import_module("numpy")
    held, dtype = bytes.fromhex(content), numpy.dtype(name)
    if len(held) != dtype.itemsize:
        raise ValueError(f"a scalar of {name} has {dtype.itemsize} bytes, and not {len(held)}")
    return numpy.ndarray((), dtype, held)[()]


ARRAY = Special("numpy.ndarray", {"dtype": (str,), "data": (torch.Tensor,)}, _split_array, _join_array)
SCALAR = Special(
    "numpy.scalar",
    {"dtype": (str,), "bytes": (str,)},
    lambda each: (each.dtype.str, each.tobytes().hex()),
    _join_scalar,
)
