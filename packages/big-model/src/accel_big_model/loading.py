"""Filling a model without memory: weights go from files to places; those on "disk" stay there."""

from __future__ import annotations

import os
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from accel_big_model.device_map import as_places, check_device_map, infer_auto_device_map, place_of
from accel_big_model.dispatch import beside_memory, refuse_dispatched, spread
from accel_big_model.memory import Place, get_balanced_memory
from accel_big_model.module_tensors import (
    as_device,
    find_tied_parameters,
    retie_parameters,
    same_bits,
    set_module_tensor_to_device,
    tensors_of,
)
from accel_big_model.weights import (
    INDEX,
    OffloadedWeightsLoader,
    StoredWeights,
    offload_weight,
    remove_index,
    save_offload_index,
)
from accel_core import CheckpointError
from accel_core.api.component import listed

M = TypeVar("M", bound=nn.Module)
_NAMED = ("auto", "balanced", "balanced_low_0", "sequential")


def load_checkpoint_and_dispatch(
    model: M,
    checkpoint: str | os.PathLike[str],
    device_map: Mapping[str, Place | torch.device] | str | None = None,
    max_memory: Mapping[Place, int | str] | None = None,
    no_split_module_classes: Sequence[str] | str | None = None,
    offload_folder: str | os.PathLike[str] | None = None,
    offload_buffers: bool = False,
    dtype: torch.dtype | str | None = None,
    offload_state_dict: bool = False,  # noqa: ARG001  (one weight at a time is in memory in any case)
    skip_keys: str | Sequence[str] | None = None,
    preload_module_classes: Sequence[str] | None = None,
    force_hooks: bool = False,
    strict: bool = True,
) -> M:
    """Fills a model from files and spreads it over places; weights on "disk" are read per call.

    Args:
        model: may lie on the meta device, as `init_empty_weights` builds it.
        checkpoint: a `.safetensors`, `.bin` or `.index.json` file, a directory of such, or a
            checkpoint of `save_state`.
        device_map: a map; "auto" or "balanced": accelerators get equally much; "balanced_low_0":
            the first gets little; "sequential": each is filled before the next. None: everything
            goes to the CPU.
        offload_folder: where weights on "disk" are written, in `dtype`. None: they stay in the files
            of the checkpoint, which have to stay, too.
        dtype: which floating weights have afterwards. None: that of the model.
        strict: whether names, shapes and kinds of dtype (floating, integer, complex, bool) have to be
            those of the model. False fills what fits, and warns of the rest.

    The other arguments are those of `infer_auto_device_map` and `dispatch_model`, but for
    `offload_state_dict`, which is without effect: one weight at a time is in memory. Raises
    `ValueError` for a map and `CheckpointError` for files that do not fit, before anything is
    changed; a file that cannot be read on the way leaves the model filled in part.
    """
    dtype = floating_dtype(dtype)
    places = planned(model, device_map, max_memory, no_split_module_classes, dtype, offload_buffers)
    tied = find_tied_parameters(model)
    weights = FittingWeights(StoredWeights(checkpoint), wanted_by(model, dtype), tied)
    weights.check(type(model).__name__, strict)
    fill(model, weights, places, offload_buffers, offload_folder)
    retie_parameters(model, tied)
    store: Mapping[str, torch.Tensor] = weights
    if offload_folder is not None and (Path(offload_folder) / INDEX).is_file():
        store = OffloadedWeightsLoader(save_folder=offload_folder)
    offloaded = partial(beside_memory, model, places, store)
    return spread(model, places, None, offloaded, offload_buffers, skip_keys, preload_module_classes, force_hooks)


def fill(
    model: nn.Module,
    weights: FittingWeights,
    places: Mapping[str, Place],
    offload_buffers: bool,
    folder: str | os.PathLike[str] | None,
) -> None:
    """Puts each weight into its place, one after the other; those on "disk" into a folder, if there is one.

    The folder is then that of this model alone: the index of another one goes before its files do.
    """
    stays = set() if offload_buffers else {name for name, _ in model.named_buffers(remove_duplicate=False)}
    tied = {name: names for names in weights.tied for name in names}
    index: dict[str, dict[str, Any]] = {}
    _refuse_without_value(model, weights, places, stays)
    if folder is not None and "disk" in places.values():
        Path(folder).mkdir(parents=True, exist_ok=True)
        remove_index(folder)
    for name in weights:
        place = place_of(name, places)
        if place == "disk" and name in stays:
            place = "cpu"  # from where dispatching brings it to where it is used
        is_written = not index.keys().isdisjoint(tied.get(name, ()))
        if place == "disk" and folder is not None and not is_written:
            offload_weight(weights[name], name, folder, index)
        value = None if place == "disk" else weights[name]
        set_module_tensor_to_device(model, name, as_device(place), value=value, dtype=weights.wanted[name].dtype)
        del value  # so that the next one is alone in main memory
    if folder is not None:
        save_offload_index(index, folder)


def _refuse_without_value(
    model: nn.Module, weights: FittingWeights, places: Mapping[str, Place], stays: Collection[str]
) -> None:
    """Raises `ValueError` for a model that is dispatched already, and for what would be read and is in no file."""
    refuse_dispatched(model)
    on_disk = [name for name in weights.wanted if name not in stays and place_of(name, places) == "disk"]
    if absent := [name for name in on_disk if name not in weights]:
        raise ValueError(
            f"{listed(absent)} of {type(model).__name__} would be read from 'disk', and the files have no value that fits. Give it another "
            f"place in the device map, where it keeps its own value."
        )


def planned(
    model: nn.Module,
    device_map: Mapping[str, Place | torch.device] | str | None,
    max_memory: Mapping[Place, int | str] | None = None,
    no_split_module_classes: Sequence[str] | str | None = None,
    dtype: torch.dtype | str | None = None,
    offload_buffers: bool = False,
    special_dtypes: Mapping[str, torch.dtype | str] | None = None,
) -> dict[str, Place]:
    """The places of a map, or of one that is made for a word; None: everything on the CPU."""
    if device_map is not None and not isinstance(device_map, Mapping):
        if device_map not in _NAMED:
            raise ValueError(
                f"device_map={device_map!r} is none of {', '.join(_NAMED)}, and no map. A map such as {{'': 'cpu'}} puts all in one place."
            )
        if device_map != "sequential":
            low_zero = device_map == "balanced_low_0"
            max_memory = get_balanced_memory(
                model, max_memory, no_split_module_classes, dtype, special_dtypes, low_zero=low_zero
            )
        device_map = infer_auto_device_map(
            model, max_memory, no_split_module_classes, dtype, special_dtypes, offload_buffers=offload_buffers
        )
    places = as_places({"": "cpu"} if device_map is None else device_map)
    check_device_map(model, places)
    return places


def floating_dtype(given: torch.dtype | str | None) -> torch.dtype | None:
    """A dtype for weights, by itself or by its name. `ValueError` for what is none."""
    found = getattr(torch, given.removeprefix("torch."), None) if isinstance(given, str) else given
    if given is not None and not (isinstance(found, torch.dtype) and found.is_floating_point):
        raise ValueError(f"dtype={given!r} is no floating dtype. Pass one such as torch.bfloat16 or 'bfloat16'.")
    return found


def wanted_by(model: nn.Module, dtype: torch.dtype | None) -> dict[str, torch.Tensor]:
    """The weights that a model has to be filled with: name → a tensor on meta."""
    return {
        name: tensor.to("meta", dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype)
        for name, tensor in tensors_of(model).items()
    }


class FittingWeights(Mapping[str, torch.Tensor]):
    """The weights of files by a model's names and dtypes; a tied weight by any of its names."""

    def __init__(
        self, stored: StoredWeights, wanted: Mapping[str, torch.Tensor], tied: Sequence[Sequence[str]]
    ) -> None:
        self.stored, self.wanted, self.tied = stored, wanted, tied
        aliases = {name: next((each for each in names if each in stored), name) for names in tied for name in names}
        self._keys = {name: name if name in stored else aliases.get(name, name) for name in wanted}

    @property
    def index(self) -> dict[str, dict[str, str]]:
        """Name → where it lies in a safetensors file, as `offload_index=` of `dispatch_model` takes it; PEFT asks."""
        return {
            name: {
                "safetensors_file": file,
                "weight_name": self._keys[name],
                "dtype": str(dtype).removeprefix("torch."),
            }
            for name in self
            if (file := self.stored.file_of(self._keys[name])).endswith(".safetensors")
            for dtype in (self.wanted[name].dtype,)
        }

    def check(self, model: str, strict: bool) -> None:
        """Raises `CheckpointError` unless names, shapes and kinds of dtype are those of the model; or it warns."""
        text = self._misfits(model)
        if text and strict:
            raise CheckpointError(f"{text} Pass strict=False to read what fits.")
        if text:
            warnings.warn(f"{text} The rest is read, because of strict=False.", stacklevel=3)

    def _misfits(self, model: str) -> str:
        missing = [name for name, key in self._keys.items() if key not in self.stored]
        unexpected = sorted(set(self.stored) - set(self._keys.values()) - set(self.wanted))
        different = [f"{name}: {words}" for name, words in self._different().items()]
        found = {"missing": missing, "unknown to the model": unexpected, "different": different}
        text = "; ".join(f"{len(names)} {what}: {', '.join(names[:5])}" for what, names in found.items() if names)
        return text and f"The weights in {self.stored.checkpoint} do not fit this {model}: {text}."

    def _different(self) -> dict[str, str]:
        """Names of what has another shape or kind of dtype, or is tied and has another value, with the difference as text."""
        found = {
            name: words
            for name, key in self._keys.items()
            if key in self.stored and (words := self.stored.misfit(key, self.wanted[name]))
        }
        for names in self.tied:
            first, *others = [name for name in names if name in self.stored and name not in found] or [""]
            unlike = [name for name in others if not self._same(first, name)]
            found |= dict.fromkeys(unlike, f"tied to {first} in the model, but of another value in the file")
        return found

    def _same(self, first: str, second: str) -> bool:
        values = self.stored[first], self.stored[second]
        return values[0].dtype == values[1].dtype and same_bits(*values)

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.stored.read(self._keys[name], self.wanted[name].dtype)

    def lend(self, name: str) -> torch.Tensor:
        """As `weights[name]`, in memory that is used again."""
        return self.stored.lend(self._keys[name], self.wanted[name].dtype)

    def __contains__(self, name: object) -> bool:
        if not isinstance(name, str) or self._keys.get(name) not in self.stored:
            return False
        return self.stored.misfit(self._keys[name], self.wanted[name]) is None

    def __iter__(self) -> Iterator[str]:
        return (name for name in self.wanted if name in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)
