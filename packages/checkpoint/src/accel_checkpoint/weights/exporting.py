"""Weights as plain safetensors: from a checkpoint of any strategy and world size, or other files.

No process group, no model and no class of the user's is needed. One tensor after another is read,
verified where the source has hashes, and written, so that this takes the memory of one tensor.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch

from accel_checkpoint.weights import saving
from accel_checkpoint.weights.sources import Stored, stored_in
from accel_checkpoint.weights.tensor_files import SAFETENSORS_DTYPES
from accel_core import CheckpointError
from accel_core.api.layouts import Box

Report = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Exported:
    """The names of written files, the entry first; numbers of tensors, aliases, and bytes."""

    files: tuple[str, ...]
    tensors: int
    aliases: int
    nbytes: int


def export_weights(
    source: str | os.PathLike[str],
    directory: str | os.PathLike[str],
    max_shard_size: int | str = "5GB",
    *,
    model: int | None = None,
    overwrite: bool = False,
    report: Report | None = None,
) -> Exported:
    """Writes weights under the user's names, as `save_model`: whole, or not at all. No collective.

    Args:
        source: a folder of `save_state`, or weights as `load_checkpoint_in_model` takes them.
        directory: made if it does not exist. Other files in it stay.
        max_shard_size: of one file, as for `save_model`.
        model: which one of a checkpoint that holds several, by its number.
        overwrite: replaces safetensors that `save_model` wrote there; else raises FileExistsError.
        report: is called after each tensor with its name, the bytes written so far, and all bytes.
    """
    source, directory = Path(source), Path(directory)
    limit = saving.parse_size(max_shard_size)
    _check_target(directory, overwrite)
    with ExitStack() as files:
        stored = stored_in(source, files, model)
        aliases = {name: each.key for name, each in stored.items() if each.key != name and each.key in stored}
        unique = {name: each for name, each in stored.items() if name not in aliases}
        sketch = {name: _sketch(source, name, each) for name, each in unique.items()}
        nbytes = sum(tensor.nbytes for tensor in sketch.values())
        parts = saving._split(sketch, aliases, limit)
        directory.mkdir(parents=True, exist_ok=True)
        done = 0

        def read(name: str) -> torch.Tensor:
            nonlocal done
            value = torch.empty_like(sketch[name], device="cpu")
            unique[name].read_box(Box.whole(tuple(value.shape)), value)
            done += value.nbytes
            if report is not None:
                report(name, done, nbytes)
            return value

        saving._publish(directory, saving._SAFETENSORS, parts, read)
    names = saving._SAFETENSORS.names(len(parts))
    entry = [saving._SAFETENSORS.index] if len(parts) > 1 else []
    return Exported((*entry, *names), len(unique), len(aliases), nbytes)


def _sketch(source: Path, name: str, stored: Stored) -> torch.Tensor:
    if stored.obstacle is not None or stored.dtype not in SAFETENSORS_DTYPES:
        raise CheckpointError(
            f"The weights in {source} were to be written as safetensors, which hold plain tensors, but {name!r} is "
            f"{stored.words}. Load them into the model, make it a plain one there, and call accelerator.save_model()."
        )
    return torch.empty(stored.shape, dtype=stored.dtype, device="meta")


def _check_target(directory: Path, overwrite: bool) -> None:
    if directory.suffix in {".safetensors", ".bin"} or (directory.exists() and not directory.is_dir()):
        text = "should be a directory for model.safetensors and its parts, but this is a file. Pass a directory"
        raise NotADirectoryError(errno.ENOTDIR, text, str(directory))
    there = saving._SAFETENSORS.entry(directory)
    if there is not None and not overwrite:
        text = f"holds weights already: {there}. Pass another directory, or overwrite=True (--force)"
        raise FileExistsError(errno.EEXIST, text, str(directory))
