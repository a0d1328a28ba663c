"""Reads weights into a model, from a checkpoint, or as `save_model` and other libraries write.

All is compared before any change. Then each tensor goes from its file into the parameter: into
its own memory if dtype and layout are equal, else by one copy. Where a rank has parts of a model,
it reads those: entries of `model_state`, or `accel_state`, a function that a strategy left.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from accel_checkpoint.weights.sources import CALL, Stored, stored_in
from accel_checkpoint.weights.weight_targets import Slot, check_memory, moved, slots_in, slots_of, unwrapped
from accel_core import CheckpointError
from accel_core.api.checkpoint import PLACEMENT, find_default
from accel_core.api.component import listed
from accel_core.api.layouts import Box

if TYPE_CHECKING:
    from accel_core.api.layouts import State

_SLAB = 16 << 20  # bytes of a tied weight that are compared at a time, if the files have it twice


def load_checkpoint_in_model(
    model: nn.Module,
    checkpoint: str | os.PathLike[str],
    device_map: Mapping[str, int | str | torch.device] | str | None = None,
    offload_folder: str | os.PathLike[str] | None = None,
    dtype: torch.dtype | str | None = None,
    offload_state_dict: bool = False,
    offload_buffers: bool = False,
    keep_in_fp32_modules: Sequence[str] | None = None,
    offload_8bit_bnb: bool = False,
    strict: bool = True,
    full_state_dict: bool = True,
    broadcast_from_rank0: bool = False,
) -> None:
    """Reads weights into a model: all, or it raises. No collective: a calling rank reads by itself.

    Parameters and buffers stay the same objects, and names that share memory stay tied: the files
    need one of them. Other values of the last two and `offload_8bit_bnb` than theirs are refused.

    Args:
        model: inside a compiled or data-parallel wrapper it is filled; of shards, this rank's.
        checkpoint: a `.safetensors`, `.bin` or `.index.json` file; or a directory with a checkpoint
            of one model, model.safetensors, pytorch_model.bin, an index, or a lone `.safetensors`.
        device_map: {"": device} moves the model there first. Several places, "disk", a word such as
            "auto", and the other `offload_*` are served by accel-big-model. Not for shards.
        dtype: of floating tensors that are read, afterwards; None: their own. Not for shards.
        keep_in_fp32_modules: names of modules below which all is float32 whatever `dtype` says.
        strict: False reads what fits, and warns of the rest.

    Raises:
        CheckpointError: if a file is damaged, has no weights or does not fit (a list). The model
            is as it was, unless the message says that it is filled in part.
        FileNotFoundError, NotInstalledError, ValueError: if nothing is there; if not offered.
    """
    if offload_8bit_bnb:
        raise ValueError(f"{CALL} was asked for offload_8bit_bnb=True, but 8-bit weights stay in memory. Leave it out.")
    refused = {"full_state_dict=False": not full_state_dict, "broadcast_from_rank0=True": broadcast_from_rank0}
    if asked := " and ".join(text for text, given in refused.items() if given):
        raise ValueError(f"{CALL} was asked for {asked}, but every rank reads what it has by itself. Leave it out.")
    inner = unwrapped(model)
    declared: Callable[[], State] | None = getattr(inner, "accel_state", None)
    offloading: dict[str, Any] = {
        "offload_folder": offload_folder, "offload_state_dict": offload_state_dict, "offload_buffers": offload_buffers,
    }  # fmt: skip
    dtypes: dict[str, Any] = {"dtype": dtype, "keep_in_fp32_modules": keep_in_fp32_modules}
    if declared is not None:
        if asked := _asked(device_map=device_map, **dtypes, **offloading):
            raise ValueError(
                f"{CALL} was asked for {asked}, but this model is cut into shards, which stay where they are and as they are. Choose dtypes "
                f"before prepare(), or by mixed_precision=."
            )
        slots = slots_of(declared())
    elif asked := _asked(device_map=_several(device_map), **offloading):
        place = find_default(*PLACEMENT, f"{CALL} with {asked}").load()
        place(inner, checkpoint, device_map=device_map, strict=strict, **dtypes, **offloading)
        return
    else:
        check_memory(inner)
        slots = slots_in(inner)
    device = _device(device_map)
    casts = _casts(slots, _dtype(dtype), keep_in_fp32_modules)
    with ExitStack() as files:
        stored = stored_in(Path(checkpoint), files)
        misfits = _compare(slots, stored)
        if misfits.any:
            text = misfits.text(type(inner).__name__, checkpoint)
            if strict:
                raise CheckpointError(f"{text}\nRead those of the same model, or pass strict=False to read what fits.")
            warnings.warn(f"{text}\nThe rest was read, because of strict=False.", stacklevel=2)
        if device is not None:
            slots = moved(inner, slots, device)
        _fill(slots, stored, misfits, casts, type(inner).__name__)


def load_weights(
    state: State,
    checkpoint: str | os.PathLike[str],
    name: str,
    rename: Callable[[str], str | None] | None = None,
) -> None:
    """Reads weights into a model's entries, as the hook `model_state` gives them: all, or raises.

    No collective: each rank reads what it has of them, in the dtypes of the state. `checkpoint`
    and errors are as for `load_checkpoint_in_model`; `name` is that of the model in messages.
    `rename` gives the name in the state of one in the files, or None to leave it out.
    """
    slots = slots_of(state)
    with ExitStack() as files:
        stored = stored_in(Path(checkpoint), files)
        if rename is not None:
            stored = {new: each for old, each in stored.items() if (new := rename(old)) is not None}
        misfits = _compare(slots, stored)
        if misfits.any:
            raise CheckpointError(f"{misfits.text(name, checkpoint)}\nPass the weights of the same model.")
        _fill(slots, stored, misfits, lambda _: None, name)


@dataclass
class _Misfits:
    """The names that do not fit: missing, unexpected, or different."""

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    different: dict[str, str] = field(default_factory=dict)

    @property
    def any(self) -> bool:
        return bool(self.missing or self.unexpected or self.different)

    def text(self, model: str, checkpoint: str | os.PathLike[str]) -> str:
        different = [f"{name}: {words}" for name, words in self.different.items()]
        kinds = {"missing in the file": self.missing, "not in the model": self.unexpected, "different": different}
        lines = [f"  {kind} ({len(names)}): {listed(names, '; ')}" for kind, names in kinds.items() if names]
        return "\n".join([f"{CALL} was asked to fill {model} from {checkpoint}, but they do not fit:", *lines])


def _casts(
    slots: Iterable[Slot], dtype: torch.dtype | None, keep_in_fp32: Sequence[str] | None
) -> Callable[[Slot], torch.dtype | None]:
    """The function that gives the new dtype of a slot; None to keep the one it has."""
    modules = list(keep_in_fp32 or ())
    if modules and dtype is None:
        raise ValueError(f"keep_in_fp32_modules={modules} was given without dtype, that of the others. Pass it too.")
    names = [name for slot in slots for name in slot.names]
    unknown = [module for module in modules if not any(_is_below(name, module) for name in names)]
    if unknown:
        raise ValueError(
            f"keep_in_fp32_modules={modules} names no weights: {listed(unknown)}. The state dict begins with {listed(names)}."
        )

    def cast(slot: Slot) -> torch.dtype | None:
        if dtype is None or slot.dtype is None or not slot.dtype.is_floating_point:
            return None
        kept = any(_is_below(name, module) for name in slot.names for module in modules)
        return torch.float32 if kept else dtype

    return cast


def _is_below(name: str, module: str) -> bool:
    return f".{module}." in f".{name}"


def _compare(slots: Sequence[Slot], stored: Mapping[str, Stored]) -> _Misfits:
    names = {name for slot in slots for name in slot.names}
    misfits = _Misfits(unexpected=[name for name in stored if name not in names])
    for slot in slots:
        found = [name for name in slot.names if name in stored]
        if not found:
            misfits.missing.append(slot.names[0])
        fitting: list[Stored] = []
        for name in found:
            words = (
                slot.obstacle or stored[name].misfit(slot.dtype, slot.shape) or _contradiction(fitting, stored[name])
            )
            if words is None:
                fitting.append(stored[name])
            else:
                misfits.different[name] = words
    return misfits


def _contradiction(tied: Sequence[Stored], stored: Stored) -> str | None:
    """The message for a tied tensor whose value differs in the files; None if it does not."""
    if not tied or (tied[0].file, tied[0].key) == (stored.file, stored.key):
        return None
    if stored.dtype == tied[0].dtype and all(
        torch.equal(_bytes_of(stored, box), _bytes_of(tied[0], box)) for box in _slabs(stored)
    ):
        return None
    return f"tied to {tied[0].key} in the model, but of another value in the file"


def _slabs(stored: Stored) -> Iterator[Box]:
    """Consecutive boxes of a tensor, so small that two of them need little memory."""
    assert stored.dtype is not None, "it fits"
    nbytes = math.prod(stored.shape) * stored.dtype.itemsize
    if nbytes <= _SLAB:
        yield Box.whole(stored.shape)
        return
    length, *rest = stored.shape
    rows = max(_SLAB * length // nbytes, 1)
    for start in range(0, length, rows):
        yield Box((start, *(0 for _ in rest)), (min(rows, length - start), *rest))


def _bytes_of(stored: Stored, box: Box) -> torch.Tensor:
    value = torch.empty(box.sizes, dtype=stored.dtype)
    stored.read_box(box, value)
    return value.view(-1).view(torch.uint8)


@torch.no_grad()
def _fill(
    slots: Iterable[Slot],
    stored: Mapping[str, Stored],
    misfits: _Misfits,
    casts: Callable[[Slot], torch.dtype | None],
    model: str,
) -> None:
    try:
        for slot in slots:
            source = next((name for name in slot.names if name in stored and name not in misfits.different), None)
            if source is not None:
                _cast(slot.tensors, casts(slot))
                for box, data in slot.pieces:
                    stored[source].read_box(box, data)
    except CheckpointError as error:
        raise CheckpointError(f"{error} {model} is filled in part: fill it anew before it is used.") from error


def _cast(tensors: Sequence[torch.Tensor], dtype: torch.dtype | None) -> None:
    """Gives tensors of one memory another one, of `dtype`, for values to come."""
    if dtype is None or tensors[0].dtype == dtype:
        return
    memory = torch.empty_like(tensors[0], dtype=dtype)
    for tensor in tensors:
        gradient, tensor.grad = tensor.grad, None
        tensor.data = memory
        if gradient is not None:
            tensor.grad = gradient.to(dtype)


def _asked(**given: object) -> str:
    """The options that were given, as text."""
    return " and ".join(f"{name}={value!r}" for name, value in given.items() if value not in (None, False))


def _several(device_map: Mapping[str, int | str | torch.device] | str | None) -> object:
    """The map, unless it names one device for the whole model."""
    single = isinstance(device_map, Mapping) and [*device_map] == [""] and device_map[""] != "disk"
    return None if single else device_map


def _device(device_map: Mapping[str, int | str | torch.device] | str | None) -> torch.device | None:
    if device_map is None:
        return None
    assert isinstance(device_map, Mapping), "words are served elsewhere"
    device = torch.device(device_map[""])
    if device.type == "meta":
        raise ValueError(f"device_map={device_map!r} leaves no memory to read weights into. Pass another device.")
    return device


def _dtype(given: torch.dtype | str | None) -> torch.dtype | None:
    dtype = getattr(torch, given.removeprefix("torch."), None) if isinstance(given, str) else given
    if given is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ValueError(f"dtype={given!r} is no floating dtype. Pass one such as torch.bfloat16 or 'bfloat16'.")
    return dtype
