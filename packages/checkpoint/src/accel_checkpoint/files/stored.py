"""Description of a rank's file in a checkpoint: places of tensors, and hashes of all bytes.

The description lies in another file, so it is believed only after it was checked: whatever it says,
it cannot make a reader look outside the file, or take the bytes of one tensor for those of another.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from accel_core import CheckpointError

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
    def from_json(cls, name: str, value: Any) -> StoredFile:
        """The description of the file `name`; CheckpointError names an invalid field."""
        if not re.fullmatch(r"[\w-][\w.-]*", name):
            raise _lie(name, "the name", name, "the name of a file, without a folder")
        fields = _fields(name, "", value, _FILE)
        tensors = {key: _tensor(name, key, entry) for key, entry in fields["tensors"].items()}
        end = fields["header_bytes"]
        most = _HEADER + sum(_ENTRY + 12 * len(key) for key in tensors)
        if end > most:
            raise _lie(name, "header_bytes", end, f"at most {most}, which is more than such tensors need")
        for key, tensor in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
            if tensor.offset != end:
                raise _lie(name, f"tensors.{key}.offset", tensor.offset, f"{end}, where the bytes before it end")
            end += tensor.nbytes
        if fields["nbytes"] != end:
            raise _lie(name, "nbytes", fields["nbytes"], f"{end}, where its last tensor ends")
        return cls(name, fields["nbytes"], fields["header_bytes"], fields["header_hash"], tensors)


def _tensor(name: str, key: str, value: Any) -> StoredTensor:
    fields = _fields(name, f"tensors.{key}", value, _TENSOR)
    fields["shape"], fields["hashes"] = tuple(fields["shape"]), tuple(fields["hashes"])
    tensor = StoredTensor(**fields)
    nbytes = math.prod(tensor.shape) * tensor.itemsize
    blocks = -(-nbytes // BLOCK)
    if tensor.nbytes != nbytes:
        raise _lie(name, f"tensors.{key}.nbytes", tensor.nbytes, f"{nbytes}, by its shape and dtype")
    if len(tensor.hashes) != blocks:
        raise _lie(name, f"the number of tensors.{key}.hashes", len(tensor.hashes), f"{blocks}, one per {BLOCK} bytes")
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


Fields = Mapping[str, tuple[Callable[[Any], bool], str]]

_FILE: Fields = {
    "nbytes": (is_size, "a number of bytes"),
    "header_bytes": (is_size, "a number of bytes"),
    "header_hash": (is_hash, "a hash"),
    "tensors": (lambda value: isinstance(value, dict), "an object with a member per tensor"),
}

_TENSOR: Fields = {
    "dtype": (lambda value: isinstance(value, str) and value in DTYPES, f"a dtype of torch {torch.__version__}"),
    "shape": (is_shape, "a list of sizes"),
    "offset": (is_size, "a number of bytes"),
    "nbytes": (is_size, "a number of bytes"),
    "hashes": (lambda value: isinstance(value, list) and all(map(is_hash, value)), "a list of hashes"),
}


def _fields(name: str, where: str, value: Any, expected: Fields) -> dict[str, Any]:
    """The members of a JSON object, each valid; none is missing, and there are no others."""
    if not isinstance(value, dict) or value.keys() != expected.keys():
        raise _lie(name, where or "the whole", value, f"an object with the members {', '.join(expected)}")
    for field, (is_right, kind) in expected.items():
        if not is_right(value[field]):
            raise _lie(name, f"{where}.{field}".lstrip("."), value[field], kind)
    return dict(value)


def _lie(name: Any, field: str, found: Any, expected: str) -> CheckpointError:
    shown = repr(found)
    return CheckpointError(
        f"the file {name!r} of the checkpoint is read as its description says, but there {field} is "
        f"{shown if len(shown) < 100 else shown[:100] + '…'}, and not {expected}: the description is damaged, or of a newer version. "
        f"Load another checkpoint, or upgrade what reads it."
    )
