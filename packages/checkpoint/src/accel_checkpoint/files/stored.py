"""Description of a rank's file in a checkpoint: places of tensors, and hashes of all bytes.

The description lies in another file, so it is believed only after it was checked: whatever it says,
it cannot make a reader look outside the file, or take the bytes of one tensor for those of another.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

BLOCK = 4 << 20  # bytes that have one hash: the least that is read of a tensor. A multiple of the size of every element
HASH_LENGTH = 32  # characters of a hash: 128 bits, in hexadecimal

_HEADER, _ENTRY = 1 << 20, 2048
"""Bytes that a header may have, and for each tensor beside its name: more than any that was written."""

_DIMS = 64  # the most dims that torch computes with

# Quantised dtypes of torch itself are no plain numbers: their scales lie elsewhere in the tensor.
DTYPES: Mapping[str, torch.dtype] = {
    str(value).removeprefix("torch."): value
    for name, value in vars(torch).items()
    if isinstance(value, torch.dtype) and not name.startswith(("q", "bit"))
}
"""The dtypes that a stored tensor may have, by the name that torch gives them: "bfloat16"."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file, in row-major order."""

    dtype: str  # torch's name, such as "bfloat16"
    shape: tuple[int, ...]
    offset: int  # from the beginning of the file, in bytes
    nbytes: int
    hashes: tuple[str, ...]  # the XXH3-128 of every `BLOCK` of its bytes, in hexadecimal

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return DTYPES[self.dtype].itemsize


@dataclass(frozen=True)
class StoredFile:
    """A file of tensors. Header and tensors lie end to end, so hashes cover every byte."""

    name: str  # without a folder
    nbytes: int
    header_bytes: int
    header_hash: str
    tensors: Mapping[str, StoredTensor]

    def to_json(self) -> dict[str, Any]:
        """All but the name, as `from_json` takes it."""
        tensors = {key: asdict(tensor) for key, tensor in self.tensors.items()}
        header = {"header_bytes": self.header_bytes, "header_hash": self.header_hash}
        return {"nbytes": self.nbytes, **header, "tensors": tensors}

    @classmethod
    def from_json(cls, name: str, value: Mapping[str, Any]) -> StoredFile:
        """The description of the file `name`; ValueError, KeyError or TypeError if it cannot be true."""
        if not re.fullmatch(r"[\w-][\w.-]*", name):
            raise ValueError(f"{name!r} is no name of a file, without a folder")
        tensors = {key: _tensor(key, entry) for key, entry in value["tensors"].items()}
        stored = cls(name, **{**value, "tensors": tensors})
        most = _HEADER + sum(_ENTRY + 12 * len(key) for key in tensors)
        if not (is_size(stored.header_bytes) and stored.header_bytes <= most and is_hash(stored.header_hash)):
            raise ValueError(
                f"{name!r} has a header of {stored.header_bytes!r:.80} bytes, with the hash {stored.header_hash!r:.80}"
            )
        end = stored.header_bytes
        for key, tensor in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
            if tensor.offset != end:
                raise ValueError(
                    f"{key!r} begins at byte {tensor.offset} of {name!r}, and what is before it ends at {end}"
                )
            end += tensor.nbytes
        if stored.nbytes != end or not is_size(stored.nbytes):
            raise ValueError(f"{name!r} has {stored.nbytes!r:.80} bytes, and its last tensor ends at {end}")
        return stored


def _tensor(key: str, value: Mapping[str, Any]) -> StoredTensor:
    tensor = StoredTensor(**{**value, "shape": tuple(value["shape"]), "hashes": tuple(value["hashes"])})
    if tensor.dtype not in DTYPES:
        raise ValueError(f"{key!r} is of the dtype {tensor.dtype!r:.80}, which torch {torch.__version__} does not have")
    if not (is_shape(value["shape"]) and is_size(tensor.offset)):
        raise ValueError(f"{key!r} has the shape {value['shape']!r:.80}, from byte {tensor.offset!r:.80} on")
    nbytes = math.prod(tensor.shape) * tensor.itemsize
    if tensor.nbytes != nbytes or not is_size(tensor.nbytes):
        raise ValueError(f"{key!r} has {tensor.nbytes!r:.80} bytes, and {nbytes} by its shape and dtype")
    blocks = -(-nbytes // BLOCK)
    if len(tensor.hashes) != blocks or not all(map(is_hash, tensor.hashes)):
        raise ValueError(f"{key!r} has not one hash for each of {blocks} blocks: {tensor.hashes!r:.80}")
    return tensor


def is_size(value: Any) -> bool:
    """Whether it is a number of bytes, or of elements, that can be."""
    return type(value) is int and 0 <= value < 1 << 63


def is_shape(value: Any) -> bool:
    """Whether it is a list of sizes that torch can make a tensor of, also if one is 0."""
    return (
        isinstance(value, list)
        and len(value) <= _DIMS
        and all(map(is_size, value))
        and math.prod(max(size, 1) for size in value) < 1 << 59
    )


def is_hash(value: Any) -> bool:
    """Whether it has the digits of a hash."""
    return isinstance(value, str) and re.fullmatch(rf"[0-9a-f]{{{HASH_LENGTH}}}", value) is not None
