"""Weights kept outside their module: in main memory, safetensors files, or an older folder.

A store is a mapping of names to tensors, read on demand. Files of safetensors, and checkpoints of
`save_state`, are read where they lie.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from accel_big_model.forks import begin_in_each_process
from accel_big_model.host_buffers import HostBuffers, own_memory
from accel_big_model.module_tensors import set_module_tensor_to_device
from accel_big_model.unchanged_files import UnchangedFiles
from accel_checkpoint import stored_in
from accel_core import CheckpointError
from accel_core.api.layouts import Box

INDEX = "index.json"

_PART = 1 << 20
"""The fewest bytes that a thread of its own reads of a tensor."""

_CALLING = 2
"""Threads that read a tensor during a call: the others compute."""

_LOADING = min(4, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
"""Threads that read a tensor which stays: most of the time goes into memory that is touched for the first time."""

Memory = Callable[[tuple[int, ...], torch.dtype], torch.Tensor]
"""Makes a tensor of any content, of a shape and dtype."""


def lent(weights: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
    """`weights[name]` for the time of a call, in memory that is used again where it is read."""
    lend = getattr(weights, "lend", None)
    value: torch.Tensor = weights[name] if lend is None else lend(name)
    return value


class StoredWeights(Mapping[str, torch.Tensor]):
    """The tensors of a safetensors file, an index, a folder or a checkpoint, read on demand.

    The files stay open, and their tensors are not kept: one that is asked for twice is read twice.
    Raises as `load_checkpoint_in_model` does for what cannot be read. Threads may read at once.
    """

    def __init__(self, checkpoint: str | os.PathLike[str]) -> None:
        self.checkpoint = Path(checkpoint)
        self._files = ExitStack()
        weakref.finalize(self, self._files.close)
        self._stored = stored_in(self.checkpoint, self._files)
        self._buffers = HostBuffers()
        begin_in_each_process(self)
        mapped = (each.file for each in self._stored.values() if each.file.suffix != ".safetensors")
        self._unchanged = UnchangedFiles(mapped)

    def begin(self) -> None:
        """Makes the threads."""
        self._threads = ThreadPoolExecutor(max(_CALLING, _LOADING) - 1, thread_name_prefix="accel-read")

    def __reduce__(self) -> tuple[Any, ...]:
        """In another process the files are opened again."""
        return StoredWeights, (self.checkpoint,)

    def __deepcopy__(self, memo: dict[int, Any]) -> StoredWeights:
        """What a copied model reads, too: by now there may be other files of these names."""
        return self

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.read(name)

    def lend(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """As `read`, in memory that is used again."""
        return self.read(name, dtype, self._buffers.tensor)

    @torch.inference_mode(False)  # other threads fill it too
    def read(self, name: str, dtype: torch.dtype | None = None, memory: Memory = own_memory) -> torch.Tensor:
        """A tensor; in `dtype`, if one is given."""
        stored = self._stored[name]
        if stored.dtype is None or stored.obstacle is not None:
            raise CheckpointError(f"{name!r} in {stored.file} cannot be read: it is {stored.words}.")
        value = memory(stored.shape, stored.dtype)
        self._unchanged.check(stored.file)  # before, too: a mapped file that is shorter now would end the process
        self._fill(value, stored.read_box, _LOADING if memory is own_memory else _CALLING)
        self._unchanged.check(stored.file)
        if dtype is None or dtype == stored.dtype:
            return value
        return memory(stored.shape, dtype).copy_(value)

    def _fill(self, value: torch.Tensor, read_box: Callable[[Box, torch.Tensor], None], threads: int) -> None:
        """Reads a tensor, a large one in parts by several threads, of which this is one."""
        parts = min(threads, value.nbytes // _PART, len(value) if value.dim() else 1)
        if parts < 2:
            read_box(Box.whole(tuple(value.shape)), value)
            return
        (length, *sizes), offsets = value.shape, [0] * (value.dim() - 1)
        starts = [length * part // parts for part in range(parts + 1)]
        rows = [*itertools.pairwise(starts)]
        boxes = [Box((first, *offsets), (last - first, *sizes)) for first, last in rows]
        others = [
            self._threads.submit(read_box, box, value[first:last])
            for box, (first, last) in zip(boxes[1:], rows[1:], strict=True)
        ]
        try:
            read_box(boxes[0], value[: starts[1]])
        finally:
            wait(others)  # nobody writes into it any more
        for other in others:
            other.result()

    def __contains__(self, name: object) -> bool:
        return name in self._stored

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def __len__(self) -> int:
        return len(self._stored)

    def misfit(self, name: str, wanted: torch.Tensor) -> str | None:
        """Why a tensor, which is not read, is no value for one of the model, as text; None if it is."""
        return self._stored[name].misfit(wanted.dtype, tuple(wanted.shape))

    def file_of(self, name: str) -> str:
        """The file of a tensor, or the folder of its checkpoint."""
        return str(self._stored[name].file)


class OffloadedWeightsLoader(Mapping[str, torch.Tensor]):
    """Weights in main memory and in files as one store.

    Args:
        state_dict: tensors in memory; they come before those in files.
        save_folder: a folder that `offload_state_dict` wrote.
        index: that of a folder: name → what `offload_weight` notes, or, with "safetensors_file" and
            "weight_name", where a tensor lies in a safetensors file.
        device: on which tensors are wanted that come from safetensors files; None: the CPU.

    Raises `ValueError` if none of the first three is given.
    """

    def __init__(
        self,
        state_dict: Mapping[str, torch.Tensor] | None = None,
        save_folder: str | os.PathLike[str] | None = None,
        index: Mapping[str, Mapping[str, Any]] | None = None,
        device: torch.device | str | int | None = None,
    ) -> None:
        if state_dict is None and save_folder is None and index is None:
            raise ValueError("OffloadedWeightsLoader() was given no weights: pass state_dict=, save_folder= or index=.")
        self.state_dict = {} if state_dict is None else state_dict
        self.save_folder = None if save_folder is None else Path(save_folder)
        if index is None and self.save_folder is not None:
            index = json.loads((self.save_folder / INDEX).read_text(encoding="utf-8"))
        self.index: Mapping[str, Mapping[str, Any]] = {} if index is None else index
        self.device = device
        self._files: dict[str, StoredWeights] = {}
        self.all_keys = list(dict.fromkeys([*self.state_dict, *self.index]))
        files = [] if self.save_folder is None else [self.save_folder / f"{key}.dat" for key in self.index]
        files += [Path(entry["safetensors_file"]) for entry in self.index.values() if "safetensors_file" in entry]
        self._unchanged = UnchangedFiles(files, open_anew=True)
        self._buffers = HostBuffers()

    def __getitem__(self, key: str) -> torch.Tensor:
        return self._read(key, own_memory)

    def lend(self, key: str) -> torch.Tensor:
        """As `loader[key]`, in memory that is used again if it is read."""
        return self._read(key, self._buffers.tensor)

    def _read(self, key: str, memory: Memory) -> torch.Tensor:
        if key in self.state_dict:
            return self.state_dict[key]
        entry = self.index[key]
        if (file := entry.get("safetensors_file")) is None:
            if self.save_folder is None:
                raise ValueError(f"{key!r} is a file in a folder that is not known: pass save_folder=.")
            path = self.save_folder / f"{key}.dat"
            value = _read_dat(path, entry, memory)
            self._unchanged.check(path)
            return value
        if file not in self._files:
            self._files[file] = StoredWeights(file)
            self._unchanged.check(Path(file))  # it is opened late, and may be another one by now
        value = self._files[file].read(entry.get("weight_name", key), memory=memory)
        dtype = getattr(torch, str(entry.get("dtype", value.dtype)).removeprefix("torch."))
        return value.to(device=self.device, dtype=dtype)

    def __contains__(self, key: object) -> bool:
        return key in self.state_dict or key in self.index

    def __iter__(self) -> Iterator[str]:
        return iter(self.all_keys)

    def __len__(self) -> int:
        return len(self.all_keys)


class PrefixedDataset(Mapping[str, torch.Tensor]):
    """The part of a store whose names begin with a prefix, which is left out."""

    def __init__(self, dataset: Mapping[str, torch.Tensor], prefix: str) -> None:
        self.dataset, self.prefix = dataset, prefix

    def __getitem__(self, key: str) -> torch.Tensor:
        return self.dataset[f"{self.prefix}{key}"]

    def lend(self, key: str) -> torch.Tensor:
        """As `dataset[key]`, in memory that is used again if it is read."""
        return lent(self.dataset, f"{self.prefix}{key}")

    def __contains__(self, key: object) -> bool:
        return f"{self.prefix}{key}" in self.dataset

    def __iter__(self) -> Iterator[str]:
        return (key.removeprefix(self.prefix) for key in self.dataset if key.startswith(self.prefix))

    def __len__(self) -> int:
        return sum(1 for _ in self)


def offload_weight(
    weight: torch.Tensor,
    weight_name: str,
    offload_folder: str | os.PathLike[str],
    index: dict[str, dict[str, Any]] | None = None,
) -> dict[str, dict[str, Any]]:
    """Writes `<offload_folder>/<weight_name>.dat`; returns `index` with its shape and dtype."""
    index = {} if index is None else index
    value = weight.detach().cpu().contiguous()
    dtype = str(value.dtype).removeprefix("torch.")
    path = Path(offload_folder) / f"{weight_name}.dat"
    path.write_bytes(value.reshape(-1).view(torch.uint8).numpy().data)
    index[weight_name] = {"dtype": dtype, "shape": list(value.shape)}
    return index


def load_offloaded_weight(weight_file: str | os.PathLike[str], weight_info: Mapping[str, Any]) -> torch.Tensor:
    """The tensor in a `.dat` file, as `offload_weight` noted. ValueError for a short file."""
    return _read_dat(weight_file, weight_info, own_memory)


def _read_dat(path: str | os.PathLike[str], info: Mapping[str, Any], memory: Memory) -> torch.Tensor:
    value = memory(tuple(info["shape"]), getattr(torch, info["dtype"]))
    place, read = value.view(-1).view(torch.uint8).numpy().data, 0
    with open(path, "rb", buffering=0) as file:
        while read < len(place) and (count := file.readinto(place[read:])):
            read += count
    if read != len(place):
        raise ValueError(f"{path} has {read} bytes of the {len(place)} that {info} needs: write the folder again.")
    return value


def save_offload_index(index: Mapping[str, Mapping[str, Any]], offload_folder: str | os.PathLike[str]) -> None:
    """Adds entries to the index of an offload folder; writes nothing if there are none."""
    if index:
        path = Path(offload_folder) / INDEX
        known = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        path.write_text(json.dumps({**known, **index}, indent=2), encoding="utf-8")


def remove_index(offload_folder: str | os.PathLike[str]) -> None:
    """Removes the index of an offload folder, if there is one. `ValueError` for a file of that name with other things."""
    path = Path(offload_folder) / INDEX
    if not path.is_file():
        return
    try:
        entries = json.loads(path.read_text(encoding="utf-8")).values()
        is_ours = all({"dtype", "shape"} <= entry.keys() or "safetensors_file" in entry for entry in entries)
    except (AttributeError, ValueError):
        is_ours = False
    if not is_ours:
        raise ValueError(f"{path} is no index of offloaded weights, and would be lost. Pass an empty folder for them.")
    path.unlink()


def offload_state_dict(save_dir: str | os.PathLike[str], state_dict: Mapping[str, torch.Tensor]) -> None:
    """Writes tensors to a folder, for `OffloadedWeightsLoader(save_folder=...)` to read.

    Others that the folder has stay in it. One that is written again is not in its index meanwhile.
    """
    Path(save_dir).mkdir(parents=True, exist_ok=True)
    index: dict[str, dict[str, Any]] = {}
    path = Path(save_dir) / INDEX
    if path.is_file():
        known = json.loads(path.read_text(encoding="utf-8"))
        path.write_text(json.dumps({name: known[name] for name in known.keys() - state_dict.keys()}), encoding="utf-8")
    for name, tensor in state_dict.items():
        offload_weight(tensor, name, save_dir, index)
    save_offload_index(index, save_dir)


def load_offloaded_weights(
    model: torch.nn.Module, index: Mapping[str, Mapping[str, Any]] | None, offload_folder: str | os.PathLike[str]
) -> None:
    """Puts the tensors of an offload folder into a model, on the CPU."""
    for name, entry in (index or {}).items():
        value = load_offloaded_weight(Path(offload_folder) / f"{name}.dat", entry)
        set_module_tensor_to_device(model, name, "cpu", value=value)


def extract_submodules_state_dict(
    state_dict: Mapping[str, torch.Tensor], submodule_names: Sequence[str]
) -> dict[str, torch.Tensor]:
    """The tensors that lie in the modules of these names."""
    names = "|".join(map(re.escape, submodule_names))
    return {key: value for key, value in state_dict.items() if re.fullmatch(rf"(?:{names})(?:\..*)?", key)}
