"""Models whose linear layers are quantised while they are loaded: `load_and_quantize_model`."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import nn

from accel_big_model.device_map import main_place, offloaded_places, place_of
from accel_big_model.dispatch import beside_memory, note_places, spread
from accel_big_model.loading import FittingWeights, planned, wanted_by
from accel_big_model.model_hooks import default_device
from accel_big_model.module_tensors import (
    as_device,
    find_tied_parameters,
    joined,
    named_module_tensors,
    owner_of,
    retie_parameters,
    set_module_tensor_to_device,
)
from accel_big_model.quantized_weights import QuantizedWeights, without_weight
from accel_big_model.quantizers import quantizer_of
from accel_big_model.weights import StoredWeights
from accel_core.api.component import listed

if TYPE_CHECKING:
    from accel_big_model.memory import Place
    from accel_big_model.quantizers import Quantizer

M = TypeVar("M", bound=nn.Module)


def load_and_quantize_model(
    model: M,
    bnb_quantization_config: object,
    weights_location: str | os.PathLike[str] | None = None,
    device_map: Mapping[str, Place | torch.device] | str | None = None,
    no_split_module_classes: Sequence[str] | str | None = None,
    max_memory: Mapping[Place, int | str] | None = None,
    offload_folder: str | os.PathLike[str] | None = None,
    offload_state_dict: bool = False,  # noqa: ARG001  (one layer at a time is in memory in any case)
    skip_modules: Sequence[str] | None = None,
) -> M:
    """Fills a model, quantises its linear layers, and spreads it, in place; returns it.

    One layer at a time is in memory as it was before. What is quantised is not trained. What a map
    puts where it does not compute (on "disk"; on "cpu" beside an accelerator) is left as it is, and
    read for each call, unless there is an `offload_folder`. `offload_state_dict` has no effect.

    Args:
        model: on the meta device, as `init_empty_weights` builds it; or with its weights.
        bnb_quantization_config: a `BnbQuantizationConfig`, or options of `torchao.quantization`.
        weights_location: as for `load_checkpoint_and_dispatch`. None: the model has its weights.
        device_map, no_split_module_classes, max_memory: as there; sizes are those of quantised
            weights. None: everything on the accelerator, or on the CPU where there is none.
        offload_folder: an empty folder, in which quantised weights on "disk" are written and from
            which they are read for each call. By torchao; bitsandbytes keeps what it has used.
        skip_modules: names of modules that are not quantised; None: as the configuration says, else
            the last module and those whose weights are tied.

    Raises:
        NotInstalledError: if the library of the configuration is missing.
        ValueError: for a model without weights or linear layers; if a map for "auto" or the like
            has no room for what is to be quantised; if the folder is of no use, or not empty.
    """
    quantizer = quantizer_of(bnb_quantization_config)
    chosen = _chosen(model, quantizer, skip_modules)
    if weights_location is None and any(parameter.is_meta for parameter in model.parameters()):
        raise ValueError(f"{type(model).__name__} is on the meta device and has no weights: pass weights_location=.")
    places = _places(model, quantizer, chosen, device_map, no_split_module_classes, max_memory)
    away = {*places.values()}.intersection(offloaded_places(main_place(places)))
    if away and weights_location is None:
        raise ValueError(
            "A model that has its weights is quantised where it computes: pass weights_location=, or another device_map."
        )
    left = _left_wide(quantizer, chosen, places, away, device_map, offload_folder)
    tied, wanted = find_tied_parameters(model), _wanted(model, quantizer)
    weights = None if weights_location is None else FittingWeights(StoredWeights(weights_location), wanted, tied)
    if weights is not None:
        weights.check(type(model).__name__, strict=True)
    store = None if offload_folder is None else QuantizedWeights(weights or {}, offload_folder)
    _fill(model, weights, wanted, places, {*chosen} - left, quantizer, store)
    retie_parameters(model, [names for names in tied if not {name.rpartition(".")[0] for name in names} & {*chosen}])
    quantizer.mark(model)
    if len({*places.values()}) > 1 or away:
        offloaded = partial(beside_memory, model, places, weights or {} if store is None else store)
        return spread(model, places, None, offloaded, False, None, None, False)
    note_places(model, places)
    return model


def _left_wide(
    quantizer: Quantizer,
    chosen: Sequence[str],
    places: Mapping[str, Place],
    away: Collection[Place],
    device_map: object,
    folder: str | os.PathLike[str] | None,
) -> set[str]:
    """The layers that are not quantised because they are offloaded, but for those that a folder takes."""
    offloaded = {name: place for name in chosen if (place := place_of(f"{name}.weight", places)) in away}
    if folder is not None and not quantizer.offloads:
        raise ValueError(
            "offload_folder= was given, and layers of bitsandbytes keep the weights that they have used, so that quantised ones cannot be "
            "offloaded. Leave it out: what a map by name offloads is not quantised, and read from its files. Or use torchao."
        )
    if folder is not None and "disk" not in offloaded.values():
        raise ValueError("offload_folder= was given, and the map has no layer to quantise on 'disk': leave it out.")
    left = [name for name, place in offloaded.items() if folder is None or place != "disk"]
    if left and isinstance(device_map, str):
        raise ValueError(
            f"device_map={device_map!r} would offload {listed(left)}, and quantised weights stay where they compute. Give max_memory= larger "
            f"limits, or, with torchao, an offload_folder=; or pass a map by name: what it offloads is not quantised."
        )
    return {*left}


def _chosen(model: nn.Module, quantizer: Quantizer, skip: Sequence[str] | None) -> list[str]:
    """The names of the layers to quantise: plain linear ones, but for what is skipped."""
    skipped = list(skip) if skip is not None else quantizer.skipped
    skipped = [*(_usually_skipped(model) if skipped is None else skipped), *quantizer.kept_wide]
    linear = [name for name, module in model.named_modules() if type(module) is nn.Linear and name]
    chosen = [name for name in linear if not any(f".{each}." in f".{name}." for each in skipped)]
    if not chosen:
        raise ValueError(
            f"{type(model).__name__} has no linear layer to quantise: {len(linear)} in all, and the modules that are skipped are "
            f"{', '.join(skipped) or 'none'}."
        )
    return chosen


def _usually_skipped(model: nn.Module) -> list[str]:
    """The modules with tied weights, and the last one: heads lose more than they save."""
    tied = [name.rpartition(".")[0] for names in find_tied_parameters(model) for name in names]
    prefix = getattr(model, "base_model_prefix", None)
    has_head = not (isinstance(prefix, str) and prefix and not hasattr(model, prefix))  # of transformers' models
    children = [name for name, _ in model.named_children()]
    return [*tied, *(children[-1:] if has_head else [])]


def _places(
    model: nn.Module,
    quantizer: Quantizer,
    chosen: Sequence[str],
    device_map: Mapping[str, Place | torch.device] | str | None,
    no_split: Sequence[str] | str | None,
    max_memory: Mapping[Place, int | str] | None,
) -> dict[str, Place]:
    if device_map is None:
        device = default_device()
        device_map = {"": device if device.type == "cpu" else torch.accelerator.current_device_index()}
    quantized = {f"{name}.weight" for name in chosen}
    sizes = {
        name: quantizer.target_dtype if name in quantized else tensor.dtype
        for name, tensor in _wanted(model, quantizer).items()
    }
    return planned(model, device_map, max_memory, no_split, None, special_dtypes=sizes)


def _wanted(model: nn.Module, quantizer: Quantizer) -> dict[str, torch.Tensor]:
    """The tensors to fill, as on meta: in the quantiser's dtype for all others, or wide."""
    wanted = wanted_by(model, quantizer.dtype)
    for name, tensor in wanted.items():
        if tensor.is_floating_point() and any(f".{each}." in f".{name}" for each in quantizer.kept_wide):
            wanted[name] = tensor.to(torch.float32)
    return wanted


def _fill(
    model: nn.Module,
    weights: FittingWeights | None,
    wanted: Mapping[str, torch.Tensor],
    places: Mapping[str, Place],
    chosen: set[str],
    quantizer: Quantizer,
    store: QuantizedWeights | None,
) -> None:
    """Fills one module after the other, and quantises it at once; what is on disk goes to the store."""
    for path, module in [*model.named_modules()]:
        for own, _ in [*named_module_tensors(module)]:
            name = joined(path, own)
            place = place_of(name, places)
            quantized_there = place == "disk" and path in chosen and own == "weight"
            keeps = name not in wanted  # a buffer that no file has
            if place == "disk" and (keeps or own in module._buffers or quantized_there):
                place = "cpu"
            value = None if weights is None or keeps or place == "disk" else weights[name]
            set_module_tensor_to_device(
                model, name, as_device(place), value=value, dtype=None if keeps else wanted[name].dtype
            )
        if path in chosen:
            assert isinstance(module, nn.Linear), "it was chosen as one"
            owner, own = owner_of(model, path)
            layer = quantizer.quantize(module)
            setattr(owner, own, layer)
            if store is not None and place_of(f"{path}.weight", places) == "disk":
                assert isinstance(layer, nn.Linear), "torchao keeps the class"
                store.add(f"{path}.weight", layer.weight)
                without_weight(layer)
    if store is not None:
        store.close()
