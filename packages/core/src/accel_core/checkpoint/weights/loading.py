"""Reads weights into a model: those of a checkpoint, and what `save_model` and other libraries write, as safetensors or by
`torch.save`.

What is read and where it goes are compared before anything is changed, so weights that do not fit leave the model as it was.
Then one tensor after another goes from its file into the parameter: into its very memory where dtype and layout are equal,
else through one copy. A `.bin` is mapped into memory; one in the format of torch before 1.6 is read whole.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from accel_core.checkpoint.weights.sources import CALL, Stored, listed, memory_of, stored_in, words_for
from accel_core.errors import CheckpointError, NotInstalledError

_INSTALL = "Type: pip install accel-big-model, and call its function of the same name; or leave it out."


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
    """Reads weights into a model: all of them, or it raises. No collective: a rank that calls it reads by itself.

    Parameters and buffers stay the same objects, so an optimizer that holds them trains the new values. Names that share
    memory in the model (tied weights) need one name in the files, and stay tied.

    Args:
        model: its parameters have memory. What is inside a compiled or data-parallel wrapper is filled.
        checkpoint: a `.safetensors` or `.bin` file; an `.index.json` that names such files; or a directory that holds a
            checkpoint of one model, as `save_state` writes it under any strategy, model.safetensors, pytorch_model.bin, an
            index of one of these names, or a single `.safetensors` file. Where there is more than one, the first in this
            order, the index of a name behind its file.
        device_map: {"": device} moves the model there first.
        offload_folder: not offered by accel-core.
        dtype: which floating tensors that are read have afterwards. None: parameters keep theirs, and values are cast.
        offload_state_dict: not offered by accel-core.
        offload_buffers: not offered by accel-core.
        keep_in_fp32_modules: names of modules, such as "norm" or "lm_head"; what is below one of them is float32 whatever
            `dtype` says.
        offload_8bit_bnb: not offered by accel-core.
        strict: False reads what fits, and warns of the rest.
        full_state_dict: only True: plain weights are whole.
        broadcast_from_rank0: only False: see above.

    Raises:
        CheckpointError: if a file is damaged or is none of weights, and, with `strict`, if the weights do not fit, listing
            what is missing, unexpected or different. The model is as it was, unless the message says that it is filled in
            part: whether the values in a checkpoint are undamaged is known when they have been read.
        FileNotFoundError: if there is no such file or directory, or no weights in it.
        NotInstalledError: for what accel-big-model offers: other device maps, and offloading.
        ValueError: for arguments that cannot be followed, a checkpoint of several models, and a model without memory.
    """
    _refuse_offloading(offload_folder, offload_state_dict, offload_buffers, offload_8bit_bnb)
    _refuse_sharding(full_state_dict, broadcast_from_rank0)
    device = _device(device_map)
    inner = _unwrapped(model)
    _check_memory(inner)
    slots = _slots(inner)
    casts = _casts(slots, _dtype(dtype), keep_in_fp32_modules)
    with ExitStack() as files:
        stored = stored_in(Path(checkpoint), files)
        misfits = _compare(slots, stored)
        if misfits.any:
            text = misfits.text(type(inner).__name__, checkpoint)
            if strict:
                raise CheckpointError(
                    f"{text}\nRead the weights of the same model, or pass strict=False to read what fits."
                )
            warnings.warn(f"{text}\nThe rest was read, because of strict=False.", stacklevel=2)
        if device is not None:
            slots = _moved(inner, slots, device)
        try:
            _fill(slots, stored, misfits, casts)
        except CheckpointError as error:
            raise CheckpointError(
                f"{error} {type(inner).__name__} is filled in part: fill it anew before it is used."
            ) from error


@dataclass
class _Misfits:
    """What does not fit, by name."""

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    different: dict[str, str] = field(default_factory=dict)

    @property
    def any(self) -> bool:
        return bool(self.missing or self.unexpected or self.different)

    def text(self, model: str, checkpoint: str | os.PathLike[str]) -> str:
        kinds = {
            "missing in the file": self.missing,
            "not in the model": self.unexpected,
            "different": [f"{name}: {words}" for name, words in self.different.items()],
        }
        lines = [f"  {kind} ({len(names)}): {listed(names, '; ')}" for kind, names in kinds.items() if names]
        return "\n".join([f"{CALL} was asked to fill {model} from {checkpoint}, but they do not fit:", *lines])


class _Slot(NamedTuple):
    """A tensor of the model that is filled, with all names under which the model has it; None if it cannot be filled."""

    names: tuple[str, ...]
    tensors: tuple[torch.Tensor, ...]
    obstacle: str | None = None


def _unwrapped(model: nn.Module) -> nn.Module:
    inner = getattr(model, "_orig_mod", model)
    if isinstance(inner, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
        inner = inner.module
    unwrapped: nn.Module = getattr(inner, "_orig_mod", inner)
    return unwrapped


def _check_memory(model: nn.Module) -> None:
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    meta = [name for name, tensor in named.items() if tensor.is_meta]
    if meta:
        raise ValueError(
            f"{CALL} fills the memory of a model, but {len(meta)} of the {len(named)} tensors of {type(model).__name__} are on "
            f"the meta device and have none: {listed(meta)}. Call model.to_empty(device=...) first, or use accel-big-model, "
            f"which loads models that are built without memory."
        )


def _slots(model: nn.Module) -> list[_Slot]:
    """One for each memory that the state dict shows, in its order."""
    owned = _owned(model)
    by_memory: dict[Any, list[str]] = {}
    for name in model.state_dict():
        by_memory.setdefault(_memory(owned.get(name), name), []).append(name)
    slots = []
    for names in by_memory.values():
        tensors = _distinct(owned, names)
        slots.append(_Slot(tuple(names), tensors, _obstacle(tensors[0] if tensors else None)))
    return slots


def _owned(model: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers(remove_duplicate=False))}


def _distinct(owned: Mapping[str, torch.Tensor], names: Iterable[str]) -> tuple[torch.Tensor, ...]:
    return tuple({id(owned[name]): owned[name] for name in names if name in owned}.values())


def _moved(model: nn.Module, slots: Iterable[_Slot], device: torch.device) -> list[_Slot]:
    """Moves the model, with its ties: those of parameters that share no more than memory would be lost."""
    model.to(device)
    owned = _owned(model)
    moved = [slot._replace(tensors=_distinct(owned, slot.names)) for slot in slots]
    for slot in moved:
        for tensor in slot.tensors[1:]:
            tensor.data = slot.tensors[0].data
    return moved


def _memory(tensor: torch.Tensor | None, name: str) -> Any:
    if tensor is None:
        return name
    return id(tensor) if _obstacle(tensor) else memory_of(tensor)


def _obstacle(tensor: torch.Tensor | None) -> str | None:
    """Why values cannot be copied into a tensor of the model, if so."""
    if tensor is None:
        return "neither a parameter nor a buffer of the model, which fills it by its own load_state_dict"
    if hasattr(tensor, "__tensor_flatten__") or tensor.layout != torch.strided:
        return f"a {type(tensor.data).__name__} of layout {tensor.layout} in the model"
    return None


def _casts(
    slots: Iterable[_Slot], dtype: torch.dtype | None, keep_in_fp32: Sequence[str] | None
) -> Callable[[_Slot], torch.dtype | None]:
    """Which dtype a slot is to have; None: the one it has."""
    modules = list(keep_in_fp32 or ())
    if modules and dtype is None:
        raise ValueError(
            f"keep_in_fp32_modules={modules} was given without dtype, so there is nothing to keep them from. Pass the dtype of "
            f"the others, or leave it out."
        )
    names = [name for slot in slots for name in slot.names]
    unknown = [module for module in modules if not any(_is_below(name, module) for name in names)]
    if unknown:
        raise ValueError(
            f"keep_in_fp32_modules={modules} was given, but the model has no weights below {listed(unknown)}. "
            f"Pass names of modules as they stand in the state dict, which begins with {listed(names)}."
        )

    def cast(slot: _Slot) -> torch.dtype | None:
        if dtype is None or not slot.tensors[0].is_floating_point():
            return None
        kept = any(_is_below(name, module) for name in slot.names for module in modules)
        return torch.float32 if kept else dtype

    return cast


def _is_below(name: str, module: str) -> bool:
    return f".{module}." in f".{name}"


def _compare(slots: Sequence[_Slot], stored: Mapping[str, Stored]) -> _Misfits:
    names = {name for slot in slots for name in slot.names}
    misfits = _Misfits(unexpected=[name for name in stored if name not in names])
    for slot in slots:
        found = [name for name in slot.names if name in stored]
        if not found:
            misfits.missing.append(slot.names[0])
        fitting: list[Stored] = []
        for name in found:
            words = _difference(slot, stored[name]) or _contradiction(fitting, stored[name])
            if words is None:
                fitting.append(stored[name])
            else:
                misfits.different[name] = words
    return misfits


def _difference(slot: _Slot, stored: Stored) -> str | None:
    if slot.obstacle is not None:
        return slot.obstacle
    tensor = slot.tensors[0]
    if stored.obstacle or tuple(tensor.shape) != stored.shape or _kind(tensor.dtype) != _kind(stored.dtype):
        return f"{stored.words} in the file, {words_for(tensor.dtype, tensor.shape)} in the model"
    return None


def _contradiction(tied: Sequence[Stored], stored: Stored) -> str | None:
    """What to say if the model ties a tensor to those, and the files have another value for it."""
    if not tied or (tied[0].file, tied[0].key) == (stored.file, stored.key):
        return None
    ours, theirs = (_bytes_of(each) for each in (stored, tied[0]))
    if torch.equal(ours, theirs):
        return None
    return f"tied to {tied[0].key} in the model, but of another value in the file"


def _bytes_of(stored: Stored) -> torch.Tensor:
    value = torch.empty(stored.shape, dtype=stored.dtype)
    stored.read_into(value)
    return value.view(-1).view(torch.uint8)


def _kind(dtype: torch.dtype | None) -> str:
    """Values of one kind can be cast to each other as training does."""
    if dtype is None or dtype is torch.bool:
        return str(dtype)
    return "complex" if dtype.is_complex else "floating" if dtype.is_floating_point else "integer"


@torch.no_grad()
def _fill(
    slots: Iterable[_Slot],
    stored: Mapping[str, Stored],
    misfits: _Misfits,
    casts: Callable[[_Slot], torch.dtype | None],
) -> None:
    for slot in slots:
        source = next((name for name in slot.names if name in stored and name not in misfits.different), None)
        if source is not None:
            _cast(slot.tensors, casts(slot))
            stored[source].read_into(slot.tensors[0])


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


def _refuse_offloading(
    offload_folder: object, offload_state_dict: bool, offload_buffers: bool, offload_8bit_bnb: bool
) -> None:
    given = {
        "offload_folder": offload_folder,
        "offload_state_dict": offload_state_dict,
        "offload_buffers": offload_buffers,
        "offload_8bit_bnb": offload_8bit_bnb,
    }
    asked = [f"{name}={value!r}" for name, value in given.items() if value not in (None, False)]
    if asked:
        raise NotInstalledError(
            f"{CALL} was asked for {', '.join(asked)}, but accel-core keeps models in memory. {_INSTALL}"
        )


def _refuse_sharding(full_state_dict: bool, broadcast_from_rank0: bool) -> None:
    asked = []
    if not full_state_dict:
        asked.append("full_state_dict=False")
    if broadcast_from_rank0:
        asked.append("broadcast_from_rank0=True")
    if asked:
        raise ValueError(
            f"{CALL} was asked for {' and '.join(asked)}, but every rank reads whole weights by itself. Leave it out; for a "
            f"model that is sharded over ranks save and load with accelerator.save_state() and accelerator.load_state()."
        )


def _device(device_map: Mapping[str, int | str | torch.device] | str | None) -> torch.device | None:
    if device_map is None:
        return None
    if isinstance(device_map, str) or list(device_map) != [""] or device_map[""] == "disk":
        raise NotInstalledError(
            f"{CALL} was given device_map={device_map!r}, but accel-core puts a model on one device, as in {{'': 'cpu'}}. "
            f"{_INSTALL}"
        )
    try:
        device = torch.device(device_map[""])
    except (RuntimeError, TypeError) as error:
        raise ValueError(
            f"device_map={device_map!r} names no device: {error}. Pass one such as {{'': 'cpu'}}."
        ) from error
    if device.type == "meta":
        raise ValueError(f"device_map={device_map!r} leaves no memory to read weights into. Pass another device.")
    return device


def _dtype(given: torch.dtype | str | None) -> torch.dtype | None:
    dtype = getattr(torch, given.removeprefix("torch."), None) if isinstance(given, str) else given
    if given is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ValueError(
            f"dtype={given!r} is no floating dtype. Pass one such as torch.bfloat16 or 'bfloat16', or leave it out."
        )
    return dtype
