"""Tensors of weight files, one at a time: safetensors, `torch.save` files of tensors only, and the
model in a checkpoint of `save_state`, whose hashes are verified while it is read.

Nothing in a file is ever run.
"""

from __future__ import annotations

import errno
import itertools
import json
import math
import re
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from accel_checkpoint.files.disk import is_memory, memory, read_file
from accel_checkpoint.files.manifest import LARGEST, Flaw, unseal
from accel_checkpoint.plan import StoredBoxes
from accel_checkpoint.reading import Checkpoint
from accel_checkpoint.run_state import MODEL
from accel_checkpoint.weights.safetensors_file import DTYPES, SafetensorsFile
from accel_checkpoint.weights.tensor_files import storage_key
from accel_core import CheckpointError
from accel_core.api.component import listed
from accel_core.api.layouts import Box

CALL = "load_checkpoint_in_model()"  # for whom the files are read, in messages
_INDEX = ".index.json"
_ENTRIES = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")


class Stored(NamedTuple):
    """A tensor in a file; tied ones share `file` and `key`. `read_box` fills any tensor."""

    file: Path
    key: str
    dtype: torch.dtype | None
    shape: tuple[int, ...]
    read_box: Callable[[Box, torch.Tensor], None]
    obstacle: str | None = None

    @property
    def words(self) -> str:
        """The tensor in a message: its obstacle, or else its dtype and shape."""
        return self.obstacle or words_for(self.dtype, self.shape)

    def misfit(self, dtype: torch.dtype | None, shape: tuple[int, ...]) -> str | None:
        """Why it is no value for a tensor of a model, as text; None if it can be cast to that as training does.

        Numbers of uint8 are one for a mask: before torch had bool, masks were saved so.
        """
        is_mask = dtype is torch.bool and self.dtype is torch.uint8
        if self.obstacle is None and self.shape == shape and (is_mask or _kind(self.dtype) == _kind(dtype)):
            return None
        return f"{self.words} in the file, {words_for(dtype, shape)} in the model"


def stored_in(checkpoint: Path, files: ExitStack, model: int | None = None) -> dict[str, Stored]:
    """The stored tensors of a checkpoint, file, index or directory, by name, until `files` closes.

    `model` is the number of one of several in a checkpoint. CheckpointError is raised for what is
    damaged or no weights, FileNotFoundError if nothing is there, ValueError for a wrong argument.
    """
    held = _stored_in_checkpoint(checkpoint, files, model)
    if held is not None:
        return held
    if model is not None:
        raise ValueError(f"Model {model} of {checkpoint} was asked for: it is no checkpoint. Leave the number out.")
    path = _entry(checkpoint)
    if path.name.endswith(_INDEX):
        return _stored_in_parts(path, files)
    return _open(path, files)


def _entry(checkpoint: Path) -> Path:
    if checkpoint.is_file():
        return checkpoint
    if not checkpoint.is_dir():
        text = "is neither a file nor a directory. Pass a checkpoint, or the directory that save_model wrote into, or a file of it"
        raise FileNotFoundError(errno.ENOENT, text, str(checkpoint))
    named = next((checkpoint / name for name in _ENTRIES if (checkpoint / name).is_file()), None)
    if named is not None:
        return named
    single = sorted(checkpoint.glob("*.safetensors"))
    if len(single) == 1:
        return single[0]
    raise _nothing_in(checkpoint, [path.name for path in single])


def _nothing_in(directory: Path, unnamed: Sequence[str]) -> FileNotFoundError:
    """The error for a directory with none or several of the files that no index names."""
    manifest = unseal(directory)
    why = manifest.found if isinstance(manifest, Flaw) else "has none of the models: all were left to hooks"
    found = f"are several files, {listed(unnamed)}, and no index" if unnamed else "is none of these"
    text = (
        f"should hold a checkpoint, but it {why}; or weights ({', '.join(_ENTRIES)}, or one .safetensors file), but there "
        f"{found}. Pass the file itself"
    )
    return FileNotFoundError(errno.ENOENT, text, str(directory))


def _stored_in_checkpoint(folder: Path, files: ExitStack, model: int | None) -> dict[str, Stored] | None:
    """The weights of one model in a checkpoint; None if there is none, or it was left to hooks."""
    found = unseal(folder)
    if isinstance(found, Flaw) and found.kind not in ("newer", "damaged"):
        return None
    checkpoint = files.enter_context(Checkpoint(folder))
    units = {int(unit.rpartition(".")[2]): unit for unit in checkpoint.units(MODEL)}
    left = checkpoint.manifest.record["left_to_hooks"]
    if not units and model is None:
        return None
    if model is None and len(units) + len(left) == 1:
        (model,) = units
    if model not in units:
        models = [f"{unit} ({len(checkpoint.names(unit))} tensors)" for unit in units.values()]
        models += [f"{unit} (left to a hook)" for unit in left]
        asked = "one model were to be read" if model is None else f"model {model} were to be read"
        raise ValueError(
            f"The weights of {asked} from {folder}, but this checkpoint has {len(models)}: {listed(sorted(models)) or 'none'}. Choose one of "
            f"these with export_weights(folder, directory, model=0) (--model 0), or restore all with accelerator.load_state(folder)."
        )
    return {name: _of_checkpoint(checkpoint, units[model], name) for name in checkpoint.names(units[model])}


def _of_checkpoint(checkpoint: Checkpoint, unit: str, name: str) -> Stored:
    index = checkpoint.index
    full = index.aliases.get(f"{unit}/{name}", f"{unit}/{name}")
    key, record = full.removeprefix(f"{unit}/"), index.tensors[full]
    if record["kind"] not in ("elementwise", "replicated"):
        forms = sorted({part["signature"] for part in record["parts"] if "signature" in part})
        return Stored(checkpoint.folder, key, None, (), _never, f"{record['kind']} ({listed(forms)}), no plain tensor,")
    whole = Box.whole(tuple(record["shape"]))
    stored = StoredBoxes(full, index.boxes(full))
    for copy in stored.copies(whole):
        checkpoint.reader(copy.stored.file)  # is opened here, so that damage is found before anything is changed
    return Stored(checkpoint.folder, key, index.dtype(full), whole.sizes, partial(_read_copies, checkpoint, stored))


def _read_copies(checkpoint: Checkpoint, stored: StoredBoxes, box: Box, target: torch.Tensor) -> None:
    data = target.detach().as_subclass(torch.Tensor)
    for copy in stored.copies(box):
        read = checkpoint.reader(copy.stored.file).read_box
        read(copy.stored.key, copy.source, data[copy.target.slices], cast=True)
    torch.autograd.graph.increment_version(target)  # it has not seen what was read into its very memory


def _stored_in_parts(index: Path, files: ExitStack) -> dict[str, Stored]:
    weight_map = weight_map_of(index)
    stored: dict[str, Stored] = {}
    for part in sorted({*weight_map.values()}):
        held = _open(index.parent / part, files)
        absent = [name for name, of in weight_map.items() if of == part and name not in held]
        if absent:
            raise CheckpointError(
                f"{index} names tensors of {part} that it does not hold: {listed(absent)}. The files are of different "
                f"models, or damaged; save or download them again."
            )
        stored.update({name: each for name, each in held.items() if weight_map.get(name, part) == part})
    return stored


def weight_map_of(index: Path) -> dict[str, str]:
    """The files of the weights by their names; `CheckpointError` for a file that is no index."""
    try:
        weight_map = json.loads(read_file(index, LARGEST))["weight_map"]
        parts = [Path(part) for part in weight_map.values()]
        sound = all(isinstance(part, str) for part in weight_map.values()) and bool(parts)
    except (ValueError, KeyError, TypeError, AttributeError):
        sound = False
    if not sound or any(part.is_absolute() or ".." in part.parts for part in parts):
        raise CheckpointError(
            f"{index} should be an index of weights, a JSON object whose weight_map names files beside it, but it is not. "
            f"Save or download it again, or pass a file of weights."
        )
    result: dict[str, str] = weight_map
    return result


def _open(path: Path, files: ExitStack) -> dict[str, Stored]:
    if path.suffix == ".safetensors":
        return _open_safetensors(path, files)
    if path.suffix == ".bin":
        return _open_bin(path)
    raise ValueError(
        f"{path} was to be read, which is neither a .safetensors, nor a .bin, nor an {_INDEX} file. Pass one of these; "
        f"rename a file that torch.save wrote, if it holds a state dict and nothing else."
    )


def _open_safetensors(path: Path, files: ExitStack) -> dict[str, Stored]:
    file = SafetensorsFile(path)
    files.callback(file.close)
    stored = {}
    for key, entry in file.tensors.items():
        dtype = DTYPES.get(entry.dtype)
        obstacle = f"of dtype {entry.dtype}, which torch lacks," if dtype is None else None
        read_box = partial(_read_box, file, entry.position, dtype, entry.shape)
        stored[key] = Stored(path, key, dtype, entry.shape, read_box, obstacle)
    return {**stored, **{alias: stored[kept] for alias, kept in _aliases(path, file.metadata, stored).items()}}


def _aliases(path: Path, metadata: Mapping[str, str], stored: Mapping[str, Stored]) -> dict[str, str]:
    """The further names of tied weights, as `save_model` writes them into the metadata."""
    try:
        aliases: dict[str, str] = json.loads(metadata.get("aliases", "{}"))
        sound = all(kept in stored for kept in aliases.values()) and not aliases.keys() & stored.keys()
    except (ValueError, TypeError, AttributeError):
        sound = False
    if not sound:
        raise CheckpointError(
            f"{path} should name tied weights in its metadata, as JSON from further names to names of its tensors, but has "
            f"{metadata['aliases']!r:.80}. It is damaged; save or download it again."
        )
    return aliases


def _read_box(
    file: SafetensorsFile,
    position: int,
    dtype: torch.dtype | None,
    shape: tuple[int, ...],
    box: Box,
    target: torch.Tensor,
) -> None:
    """Fills a tensor with a box of stored data: in its own memory if possible, else by a copy."""
    direct = is_memory(target) and target.dtype == dtype
    data = target if direct else torch.empty(target.shape, dtype=dtype)
    if data.numel():
        view = memory(data)
        for run in _runs(shape, box):
            nbytes = len(run) * data.itemsize
            file.read(position + run.start * data.itemsize, view[:nbytes])
            view = view[nbytes:]
    if direct:
        torch.autograd.graph.increment_version(target)  # it has not seen the change
    else:
        target.copy_(data)


def _runs(shape: tuple[int, ...], box: Box) -> Iterator[range]:
    """The elements of a non-empty box in runs of the whole tensor, in row-major order."""
    cut = len(shape)
    while cut and box.sizes[cut - 1] == shape[cut - 1]:
        cut -= 1  # what is whole in the last dims hangs together, and the dim before them goes with it
    outer = max(cut - 1, 0)
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    length = math.prod(box.sizes[outer:])
    for index in itertools.product(*(range(size) for size in box.sizes[:outer])):
        place = map(sum, itertools.zip_longest(box.offsets, index, fillvalue=0))
        start = sum(at * stride for at, stride in zip(place, strides, strict=True))
        yield range(start, start + length)


def _open_bin(path: Path) -> dict[str, Stored]:
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except OSError:
        raise
    except Exception as error:  # noqa: BLE001  (whatever a damaged or hostile file brings about)
        wanted = re.search(r"GLOBAL (\S+)", str(error))
        reason = f"its pickle asks for {wanted[1]}" if wanted else f"torch cannot read it ({type(error).__name__})"
        raise CheckpointError(
            f"{path} should hold weights and nothing else, but {reason}. Nothing of it was run, and nothing was loaded. "
            f"Save or download the weights again, best as safetensors."
        ) from None  # torch's own message advises to run whatever is in the file
    if not isinstance(content, Mapping) or not all(isinstance(name, str) for name in content):
        raise CheckpointError(
            f"{path} should hold a state dict, a mapping from names to tensors, but it holds a {type(content).__name__}. "
            f"Save model.state_dict() alone."
        )
    return dict(_stored_in_bin(path, content))


def _stored_in_bin(path: Path, content: Mapping[str, Any]) -> Iterator[tuple[str, Stored]]:
    first: dict[Any, str] = {}
    for name, value in content.items():
        if type(value) not in (torch.Tensor, nn.Parameter) or value.layout != torch.strided or value.is_quantized:
            yield name, Stored(path, name, None, (), _never, f"a {type(value).__name__}, no plain tensor,")
            continue
        key = first.setdefault(storage_key(value), name)
        yield name, Stored(path, key, value.dtype, tuple(value.shape), partial(_copy_box, value.detach()))


def _never(box: Box, target: torch.Tensor) -> None:  # noqa: ARG001  (it stands where one is taken)
    raise AssertionError("what has an obstacle is not read")


def _copy_box(value: torch.Tensor, box: Box, target: torch.Tensor) -> None:
    target.copy_(value[box.slices])


def _kind(dtype: torch.dtype | None) -> str:
    """Values of one kind can be cast to each other as training does."""
    if dtype is None or dtype is torch.bool:
        return str(dtype)
    return "complex" if dtype.is_complex else "floating" if dtype.is_floating_point else "integer"


def words_for(dtype: torch.dtype | None, shape: Sequence[int]) -> str:
    """A tensor in a message: float32[3, 4]."""
    return f"{str(dtype).removeprefix('torch.')}[{', '.join(map(str, shape))}]"
