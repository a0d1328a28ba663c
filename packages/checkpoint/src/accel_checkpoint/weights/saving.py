"""A model's weights as plain files for any library: `Accelerator.save_model` and `.save`.

    model.safetensors                       everything, if it fits into one file; else
    model-00001-of-00003.safetensors, …     the parts, and
    model.safetensors.index.json            which tensor is in which part

With `safe_serialization=False` the same, named `pytorch_model` and `.bin`, by `torch.save`. New
files are synced under temporary names, then renamed, the entry for readers last; then our old
parts are removed. Tied weights are written once; other names are metadata, "aliases".
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import torch
from torch import nn

from accel_checkpoint.assembling import WeightGather
from accel_checkpoint.collective_steps import on_main_rank
from accel_checkpoint.files.disk import sync_folder
from accel_checkpoint.weights import tensor_files
from accel_checkpoint.weights.sources import weight_map_of
from accel_checkpoint.weights.tensor_files import Aliases, Read, Tensors, replace_file, stage
from accel_core.api.component import flatten

if TYPE_CHECKING:
    from accel_core import World

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?((?:[KMGT]i?)?)B")


def save_weights(
    weights: nn.Module | Tensors | WeightGather,
    directory: str | os.PathLike[str],
    max_shard_size: int | str,
    safe_serialization: bool,
    world: World,
) -> None:
    """Writes a model's weights. A collective: it returns or raises when all is on the disk.

    `weights` are the model or a state dict, read by the main process only, or a gathering on each.
    """
    if isinstance(weights, WeightGather):
        write = partial(write_weights, weights, directory, max_shard_size, safe_serialization)
        weights.together("save_model()", write)
        return

    def work() -> None:
        state = weights.state_dict() if isinstance(weights, nn.Module) else weights
        write_weights(state, directory, max_shard_size, safe_serialization)

    on_main_rank(world, work)


def write_weights(
    weights: Tensors | WeightGather,
    directory: str | os.PathLike[str],
    max_shard_size: int | str = "10GB",
    safe_serialization: bool = True,
) -> None:
    """Writes the weights on the main process. No collective; reads a gathering in `together`."""
    limit = parse_size(max_shard_size)
    folder, files = Path(directory), _SAFETENSORS if safe_serialization else _PICKLED
    preferred = None if safe_serialization else _SAFETENSORS.entry(folder)
    if preferred is not None:
        raise ValueError(
            f"save_model(safe_serialization=False) was asked to write into {folder}, which holds {preferred}: whoever loads "
            f"from there takes that file, and not the new weights. Pass another directory, or remove it first."
        )
    unique, aliases, read = _contents(weights)
    if safe_serialization:
        tensor_files.check_safetensors(unique)
    folder.mkdir(parents=True, exist_ok=True)
    _publish(folder, files, _split(unique, aliases, limit), read)


def _contents(weights: Tensors | WeightGather) -> tuple[dict[str, torch.Tensor], dict[str, str], Read]:
    """The tensors to write, their further names, and the function that reads one."""
    if not isinstance(weights, WeightGather):
        unique, aliases = tensor_files.untie(weights)
        return unique, aliases, unique.__getitem__
    awaited = weights.awaited
    unique, aliases = tensor_files.untie(weights.sketch(), awaited)
    return unique, aliases, lambda name: weights[name] if name in awaited else unique[name]


def save(
    obj: Any,
    f: str | os.PathLike[str],
    safe_serialization: bool = False,
    *,
    world: World,
    save_on_each_node: bool = False,
) -> None:
    """Writes one object on the main process, or each node's; replaces a whole file. No collective.

    What cannot be written raises TypeError or ValueError; sharded tensors do so on every rank.
    """
    _refuse_parts(obj)
    if not (world.is_local_main if save_on_each_node else world.is_main):
        return
    if not safe_serialization:
        replace_file(Path(f), lambda file: tensor_files.torch_save(obj, file))
        return
    if not isinstance(obj, Mapping) or not all(isinstance(name, str) for name in obj):
        raise TypeError(
            f"save(safe_serialization=True) takes a mapping from names to tensors, but got {type(obj).__name__}: {obj!r:.80}. "
            f"Pass a state dict, or leave out safe_serialization: torch.save takes any object."
        )
    unique, aliases = tensor_files.untie(obj)
    tensor_files.check_safetensors(unique)
    replace_file(Path(f), partial(tensor_files.write_safetensors, unique, aliases, unique.__getitem__))


def _refuse_parts(obj: Any) -> None:
    # DTensors have `full_tensor`. Their module is not imported for this.
    if any(isinstance(each, torch.Tensor) and hasattr(each, "full_tensor") for each in flatten(obj)[0]):
        raise ValueError(
            "save() was given tensors of which each rank has a part (DTensors), so the file would hold that of this rank alone. Gather them on "
            "every rank first: accelerator.get_state_dict(model); or call accelerator.save_model(model, folder)."
        )


def parse_size(size: int | str) -> int:
    """Bytes, at least 1. An int is that many; "10GB" is 10 * 10**9, "10GiB" is 10 * 2**30."""
    number = 0
    if isinstance(size, int) and not isinstance(size, bool):
        number = size
    elif isinstance(size, str) and (match := _SIZE.fullmatch(size.strip())):
        number = int(Decimal(match[1]) * _UNITS[match[2]])
    if number < 1:
        raise ValueError(
            f"max_shard_size={size!r} is not the size of a file. Pass a positive number of bytes, or a text such as "
            f'"5GB": B, KB, MB, GB, TB count in powers of 1000, KiB, MiB, GiB, TiB in powers of 1024.'
        )
    return number


@dataclass(frozen=True)
class _Files:
    """One file format: the names of its files, and the function that writes one."""

    stem: str
    suffix: str
    write: Callable[[Tensors, Aliases, Read, BinaryIO], None]
    holds_aliases: bool  # under their own names, or in the metadata

    @property
    def single(self) -> str:
        return f"{self.stem}{self.suffix}"

    @property
    def index(self) -> str:
        return f"{self.single}.index.json"

    def names(self, count: int) -> list[str]:
        if count == 1:
            return [self.single]
        return [f"{self.stem}-{number:05d}-of-{count:05d}{self.suffix}" for number in range(1, count + 1)]

    def entry(self, folder: Path) -> str | None:
        """The file through which readers enter: they all look for the single one first."""
        return next((name for name in (self.single, self.index) if (folder / name).is_file()), None)

    def ours(self, folder: Path) -> list[str]:
        """The files of this format, entries first, and temporary ones: `<name>.<8 digits>.tmp`."""
        part = rf"{re.escape(self.stem)}(?:(?:-previous)?-\d{{5}}-of-\d{{5}})?{re.escape(self.suffix)}"
        pattern = re.compile(rf"(?:{part}|{re.escape(self.index)})(?:\.[0-9a-f]{{8}}\.tmp)?")
        names = [path.name for path in folder.iterdir() if pattern.fullmatch(path.name)]
        return sorted(names, key=lambda name: (name not in {self.single, self.index}, name))


_SAFETENSORS = _Files("model", ".safetensors", tensor_files.write_safetensors, holds_aliases=False)
_PICKLED = _Files("pytorch_model", ".bin", tensor_files.write_pickled, holds_aliases=True)


@dataclass
class _Part:
    """The contents of one file."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())


def _split(tensors: Tensors, aliases: Aliases, limit: int) -> list[_Part]:
    """Fills parts in the order of the state dict. An alias goes where its tensor is."""
    parts = [_Part()]
    holder: dict[str, _Part] = {}
    size = 0
    for name, tensor in tensors.items():
        if parts[-1].tensors and size + tensor.nbytes > limit:
            parts.append(_Part())
            size = 0
        size += tensor.nbytes
        parts[-1].tensors[name] = tensor
        holder[name] = parts[-1]
    for alias, kept in aliases.items():
        holder[kept].aliases[alias] = kept
    return parts


def _publish(folder: Path, files: _Files, parts: list[_Part], read: Read) -> None:
    """Writes all parts under temporary names, then puts them in the place of the old set."""
    names = files.names(len(parts))
    _remove(folder, [name for name in files.ours(folder) if name.endswith(".tmp")])  # a killed save left them
    staged: dict[Path, Path] = {}
    try:
        for name, part in zip(names, parts, strict=True):
            path = folder / name
            staged[path] = stage(path, partial(files.write, part.tensors, part.aliases, read))
        if len(parts) > 1:
            index = _index(names, parts, files.holds_aliases)
            staged[folder / files.index] = stage(folder / files.index, lambda file: _write_json(index, file))
            _free_names(folder, files, names)
        for path, temporary in staged.items():
            sync_folder(folder)  # each before the next, so that the index is the last one also after a power cut
            temporary.replace(path)
    finally:
        _remove(folder, [temporary.name for temporary in staged.values()])
    sync_folder(folder)
    new = {path.name for path in staged}
    # Entries first: a single file that is there hides the new index until it goes, and no index may name what is gone.
    _remove(folder, [name for name in files.ours(folder) if name not in new])


def _free_names(folder: Path, files: _Files, names: list[str]) -> None:
    """Lets the existing index name its parts otherwise, if the new set takes their names.

    Parts are replaced one by one: an index that named them would describe a mixture of two models.
    """
    index = folder / files.index
    if not index.is_file():
        return
    taken = sorted({*weight_map_of(index).values()} & {*names})
    content = json.loads(index.read_bytes())
    previous = f"{files.stem}-previous"
    aside = {name: name.replace(files.stem, previous, 1) for name in taken if (folder / name).is_file()}
    for name, other in aside.items():
        (folder / other).unlink(missing_ok=True)  # left by a save that was killed before the index named it
        _link_or_copy(folder / name, folder / other)
    content["weight_map"] = {key: aside.get(name, name) for key, name in content["weight_map"].items()}
    replace_file(index, lambda file: _write_json(content, file))


def _link_or_copy(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # a file system without hard links
        shutil.copyfile(source, target)


def _index(names: list[str], parts: list[_Part], holds_aliases: bool) -> dict[str, Any]:
    weight_map: dict[str, str] = {}
    for name, part in zip(names, parts, strict=True):
        weight_map.update(dict.fromkeys(part.tensors, name))
        if holds_aliases:
            weight_map.update(dict.fromkeys(part.aliases, name))
    return {"metadata": {"total_size": sum(part.nbytes for part in parts)}, "weight_map": weight_map}


def _write_json(content: Any, file: BinaryIO) -> None:
    file.write(json.dumps(content, indent=2).encode() + b"\n")


def _remove(folder: Path, names: list[str]) -> None:
    for name in names:
        (folder / name).unlink(missing_ok=True)
