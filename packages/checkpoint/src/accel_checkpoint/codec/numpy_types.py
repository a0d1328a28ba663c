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
"""The dtypes that NumPy and torch name alike. Arrays of other dtypes are kept as bytes, with one dim more."""

_DTYPE = re.compile(r"[<>|][biufcSUmM]\d+(\[\d*[a-zA-Zμ]+\])?")


def numpy_special(value: Any) -> Special | None:
    """The encoding of a NumPy array or scalar; None for any other value.

    Raises:
        Unfit: for arrays of objects, of several fields, and of other classes.
    """
    numpy: Any = sys.modules.get("numpy")
    if numpy is None or not isinstance(value, (numpy.ndarray, numpy.generic)):
        return None
    if isinstance(value, numpy.ndarray) and type(value) is not numpy.ndarray:
        raise Unfit(
            f"is a {type_name(type(value))}, and only arrays of NumPy's own class can be saved",
            "Give a plain array of the same content, as numpy.asarray makes it.",
        )
    if not _DTYPE.fullmatch(value.dtype.str):
        kind = type_name(type(value))
        raise Unfit(
            f"is a {kind} of dtype {value.dtype}, which a checkpoint cannot hold",
            "Give a list, or one array for each field." if kind == "numpy.ndarray" else refusal(value).advice,
        )
    return ARRAY if isinstance(value, numpy.ndarray) else SCALAR


def _split_array(array: Any) -> tuple[str, torch.Tensor]:
    dtype = array.dtype
    if dtype.name in SHARED and dtype.isnative:
        strided = array.flags.writeable and all(
            stride >= 0 and stride % dtype.itemsize == 0 for stride in array.strides
        )
        return dtype.name, torch.from_numpy(array if strided else array.copy("C"))
    if not dtype.itemsize:
        raise Unfit(f"is an array of dtype {dtype.str}, whose items have no bytes", "Give a list of its items.")
    content = torch.frombuffer(bytearray(array.tobytes()), dtype=torch.uint8) if array.size else torch.empty(0)
    return dtype.str, content.to(torch.uint8).view(*array.shape, dtype.itemsize)


def _join_array(name: str, data: torch.Tensor) -> Any:
    numpy, data = _numpy(), data.detach().cpu()
    if name in SHARED:
        if data.dtype != find_dtype(name):
            raise ValueError(f"an array of {name} is not kept as {data.dtype}")
        return data.numpy()
    dtype = _dtype(name)
    if data.dtype != torch.uint8 or data.ndim < 1 or data.shape[-1] != dtype.itemsize:
        raise ValueError(f"an array of {name} is kept as {dtype.itemsize} bytes an item")
    content = bytearray(data.contiguous().numpy().tobytes())
    return numpy.ndarray(tuple(data.shape[:-1]), dtype, content)


def _split_scalar(scalar: Any) -> tuple[str, str]:
    return scalar.dtype.str, scalar.tobytes()[: scalar.dtype.itemsize].hex()  # an empty text gives a byte more


def _join_scalar(name: str, content: str) -> Any:
    numpy, dtype, held = _numpy(), _dtype(name), bytes.fromhex(content)
    if len(held) != dtype.itemsize:
        raise ValueError(f"a scalar of {name} has {dtype.itemsize} bytes, and not {len(held)}")
    return numpy.ndarray((), dtype, held or bytes(1))[()]  # an empty text needs a buffer too


def _dtype(name: str) -> Any:
    if not _DTYPE.fullmatch(name):
        raise ValueError(f"{name!r:.40} is no dtype of numbers, dates or text")
    return _numpy().dtype(name)


def _numpy() -> Any:
    try:
        return importlib.import_module("numpy")
    except ImportError as error:
        raise Unfit("is a value of NumPy's, which is not installed", "Type: pip install numpy") from error


ARRAY = Special("numpy.ndarray", {"dtype": (str,), "data": (torch.Tensor,)}, _split_array, _join_array)
SCALAR = Special("numpy.scalar", {"dtype": (str,), "bytes": (str,)}, _split_scalar, _join_scalar)
