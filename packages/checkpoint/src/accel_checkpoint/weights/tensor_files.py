"""A file of named tensors: as safetensors or by `torch.save`, written aside, then put in place.

The safetensors format is written here, and not by `safetensors.torch`, because that needs NumPy,
holds the whole file in CPU memory, makes files that only their owner can read, and reports a full
disk without its errno. What is written is read by that library in the tests.
"""

from __future__ import annotations

import json
import os
import secrets
import sys
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch

from accel_checkpoint.files.disk import memory, new_file, removed_on_failure, sync_folder

Tensors = Mapping[str, torch.Tensor]
Aliases = Mapping[str, str]
Read = Callable[[str], torch.Tensor]
Write = Callable[[BinaryIO], None]

# The names are those of the format's description: https://github.com/huggingface/safetensors#format
SAFETENSORS_DTYPES = {
    torch.bool: "BOOL", torch.uint8: "U8", torch.int8: "I8", torch.uint16: "U16", torch.int16: "I16", torch.uint32: "U32",
    torch.int32: "I32", torch.uint64: "U64", torch.int64: "I64", torch.float16: "F16", torch.bfloat16: "BF16", torch.float32: "F32",
    torch.float64: "F64", torch.complex64: "C64", torch.float8_e4m3fn: "F8_E4M3", torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2: "F8_E5M2", torch.float8_e5m2fnuz: "F8_E5M2FNUZ", torch.float8_e8m0fnu: "F8_E8M0",
}  # fmt: skip


def untie(tensors: Mapping[str, Any], awaited: Collection[str] = ()) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """The tensors without repetitions, and each other name with the first, which keeps its tensor.

    Only names of the same memory are tied. `awaited` names tensors on the meta device whose data
    come later. ValueError names the values that are not plain, dense tensors with data.
    """
    here = {name: value for name, value in tensors.items() if name not in awaited}
    meta = [name for name, value in here.items() if isinstance(value, torch.Tensor) and value.is_meta]
    if meta:
        raise ValueError(
            f"weights are written with their data, but {len(meta)} of {len(tensors)} tensors are on the meta device and have "
            f"none: {', '.join(meta)}. Load or initialise them before saving."
        )
    unique: dict[str, torch.Tensor] = {}
    aliases: dict[str, str] = {}
    first: dict[Any, str] = {}
    for name, value in tensors.items():
        tensor = _plain(name, value)
        kept = first.setdefault(storage_key(tensor) if name in here else id(value), name)
        if kept != name:
            aliases[name] = kept
        else:
            unique[name] = tensor
    return unique, aliases


def storage_key(tensor: torch.Tensor) -> Any:
    """A key that is equal for plain tensors that are the same memory."""
    if not tensor.numel():
        return id(tensor)
    return tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _plain(name: str, value: Any) -> torch.Tensor:
    # A wrapper subclass (DTensor, quantised weights) has no memory of its own that could be written.
    if not isinstance(value, torch.Tensor) or hasattr(value, "__tensor_flatten__"):
        raise ValueError(
            f"weights are written as plain tensors, but {name!r} is a {type(value).__name__}. Make it a whole, plain "
            f"tensor first, or take it out of the state dict (get_extra_state puts objects there)."
        )
    if value.layout != torch.strided:
        raise ValueError(f"weights are dense, but {name!r} has the layout {value.layout}. Call .to_dense() on it.")
    return value.detach().resolve_conj().resolve_neg()


def check_safetensors(tensors: Tensors) -> None:
    """Raises ValueError, naming the first tensor whose dtype safetensors does not have."""
    for name, tensor in tensors.items():
        if tensor.dtype not in SAFETENSORS_DTYPES:
            raise ValueError(
                f"safetensors cannot hold {name!r}, whose dtype is {tensor.dtype}. "
                f"Convert it, or pass safe_serialization=False, which writes it with torch.save."
            )


def write_safetensors(tensors: Tensors, aliases: Aliases, read: Read, file: BinaryIO) -> None:
    """Writes tensors, each from `read` in turn, then dropped; aliases as JSON in the metadata."""
    metadata = {"format": "pt"}  # transformers refuses files that do not say so
    if aliases:
        metadata["aliases"] = json.dumps(aliases)
    names = in_order(tensors)
    file.write(header_of({name: tensors[name] for name in names}, metadata, alignment=8))
    for name in names:
        _write_data(read(name), file)


def in_order(tensors: Tensors) -> list[str]:
    """The names by falling element size: so tensors are aligned, and readers map without a copy."""
    return sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))


def header_of(tensors: Tensors, metadata: Mapping[str, str], alignment: int) -> bytes:
    """The bytes before tensors, end to end in this order; dtypes safetensors lacks are bytes."""
    entries: dict[str, Any] = {"__metadata__": metadata}
    position = 0
    for name, tensor in tensors.items():
        dtype, shape = SAFETENSORS_DTYPES.get(tensor.dtype), list(tensor.shape)
        if dtype is None:
            dtype, shape = "U8", [*shape, tensor.element_size()]
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [position, position + tensor.nbytes]}
        position += tensor.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % alignment)
    return len(text).to_bytes(8, "little") + text


def _write_data(tensor: torch.Tensor, file: BinaryIO) -> None:
    assert sys.byteorder == "little", "the format is little-endian"
    if tensor.numel():
        tensor = tensor.contiguous().cpu()  # `tensor` keeps the memory alive while it is written
        file.write(memory(tensor))


def write_pickled(tensors: Tensors, aliases: Aliases, read: Read, file: BinaryIO) -> None:
    """Writes all with `torch.save`, all data in memory; `weights_only=True` loads it, with ties."""
    alone = {name: _alone(read(name)) for name in tensors}
    torch_save(alone | {alias: alone[kept] for alias, kept in aliases.items()}, file)


def _alone(tensor: torch.Tensor) -> torch.Tensor:
    # torch.save writes whole storages: a row of an embedding would bring the table with it.
    tensor = tensor.contiguous().cpu()
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def torch_save(obj: Any, file: BinaryIO) -> None:
    """`torch.save`, but a file's failure is raised as such; its zip writer hides it otherwise."""
    try:
        torch.save(obj, file)
    except RuntimeError as error:
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise


def stage(path: Path, write: Write) -> Path:
    """Writes a temporary file beside `path`, all on the disk; returns it, or leaves nothing."""
    temporary = temporary_for(path)
    with new_file(temporary, named=path) as output, os.fdopen(output.descriptor, "wb", closefd=False) as file:
        write(file)
    return temporary


def temporary_for(path: Path) -> Path:
    """The place beside a file in which the next one is written, under a name of its own."""
    return path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")


def replace_file(path: Path, write: Write) -> None:
    """Writes `path`: readers and crashes see the old file or the new one, never a part."""
    temporary = stage(path, write)
    with removed_on_failure(temporary):
        temporary.replace(path)
    sync_folder(path.parent)
