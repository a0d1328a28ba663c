"""Spreading a model over places, and running it there: `dispatch_model` and its relatives."""

from __future__ import annotations

import os
from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, cast

import torch
from torch import nn

from accel_big_model.align_hook import AlignDevicesHook, DeviceLike, has_offloaded_params
from accel_big_model.attachment import (
    attach_align_device_hook,
    attach_align_device_hook_on_blocks,
    look_for_empty,
)
from accel_big_model.device_map import (
    as_places,
    check_device_map,
    main_place,
    offloaded_places,
    place_of,
    unplaced,
    without_nesting,
)
from accel_big_model.hooks import add_hook_to_module
from accel_big_model.model_hooks import CpuOffload, UserCpuOffloadHook
from accel_big_model.module_tensors import as_device, find_tied_parameters, retie_parameters, same_bits, tensors_of
from accel_big_model.prefetch import Prefetcher
from accel_big_model.tied_weights import TiedWeights
from accel_big_model.weights import INDEX, OffloadedWeightsLoader, offload_state_dict
from accel_core.api.component import listed

if TYPE_CHECKING:
    from accel_big_model.memory import Place

M = TypeVar("M", bound=nn.Module)


def dispatch_model(
    model: M,
    device_map: Mapping[str, Place | torch.device],
    main_device: DeviceLike | None = None,
    state_dict: Mapping[str, torch.Tensor] | None = None,
    offload_dir: str | os.PathLike[str] | None = None,
    offload_index: Mapping[str, Mapping[str, Any]] | None = None,
    offload_buffers: bool = False,
    skip_keys: str | Sequence[str] | None = None,
    preload_module_classes: Sequence[str] | None = None,
    force_hooks: bool = False,
) -> M:
    """Spreads a model over the places of a device map, in place; returns it. It runs as before.

    Modules on "cpu", where there is an accelerator, and on "disk" compute on `main_device`; their
    weights are brought for each call, those of the next module meanwhile. The model gets
    `hf_device_map`; its `to()` raises.

    Args:
        device_map: name of a module, parameter or buffer → index of an accelerator, "cpu", "disk",
            or a device. Every tensor lies in one, but for buffers that are not saved: those that
            lie in none go to `main_device`.
        main_device: None: the first accelerator in the map, else the CPU.
        state_dict: weights of what is on "cpu". None: the model's own.
        offload_dir: for what is on "disk": a folder of `offload_state_dict`, which is written if
            it has no index, else has the values of the model, unless that is on meta.
        offload_index: name → where it lies, in that folder or in safetensors files.
        offload_buffers: whether buffers are offloaded too.
        skip_keys: keywords of inputs that stay where they are.
        preload_module_classes: names of classes whose weights are brought together.
        force_hooks: attaches hooks although everything is in one place.

    Raises `ValueError` if the map or folder misfits the model, or weights on "disk" have none.
    """
    check_device_map(model, device_map)
    refuse_dispatched(model)
    places = as_places(device_map)
    stored = partial(_stored, model, places, state_dict, offload_dir, offload_index)
    return spread(model, places, main_device, stored, offload_buffers, skip_keys, preload_module_classes, force_hooks)


def refuse_dispatched(model: nn.Module) -> None:
    """Raises `ValueError` for a model of which something is offloaded already."""
    if any(has_offloaded_params(module) for module in model.modules()):
        raise ValueError(
            f"This {type(model).__name__} is dispatched already: weights that are offloaded are read from where they are. Build the "
            f"model anew, and fill or dispatch that."
        )


def _stored(
    model: nn.Module,
    places: Mapping[str, Place],
    state_dict: Mapping[str, torch.Tensor] | None,
    folder: str | os.PathLike[str] | None,
    index: Mapping[str, Mapping[str, Any]] | None,
    offloaded: Sequence[Place],
) -> Mapping[str, torch.Tensor]:
    """The weights of offloaded places. Writes those on "disk" to a folder without an index."""
    by_place: dict[Place, dict[str, torch.Tensor]] = {"cpu": {}, "disk": {}}
    for name, value in (tensors_of(model) if state_dict is None else state_dict).items():
        if (place := place_of(name, places)) in by_place and place in offloaded:
            by_place[place][name] = value
    on_disk = {name: value for name, value in by_place["disk"].items() if name not in (index or {})}
    if on_disk and folder is None:
        raise ValueError(
            f"device_map has {listed(sorted(on_disk))} on 'disk', and nothing says where there. Pass offload_dir=, or "
            f"load_checkpoint_and_dispatch(), which reads the files of the weights."
        )
    found = on_disk
    if on_disk and folder is not None and not (Path(folder) / INDEX).is_file():
        if empty := [name for name, value in on_disk.items() if value.is_meta]:
            raise ValueError(f"{empty[0]} is to be written to {folder}, and has no value. Load the weights first.")
        offload_state_dict(folder, on_disk)
        found = {}
    in_memory = {name: value.detach().to("cpu") for name, value in by_place["cpu"].items()}
    store = _joined(in_memory, folder if by_place["disk"] else None, index)
    _check_folder(model, by_place["disk"], store, found)
    return store


def _check_folder(
    model: nn.Module,
    wanted: Mapping[str, torch.Tensor],
    store: OffloadedWeightsLoader,
    found: Mapping[str, torch.Tensor],
) -> None:
    """Raises `ValueError` if a folder or index is that of another model; `found`: what a folder had already."""
    tied = {name: names for names in find_tied_parameters(model) for name in names}
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    where, known = store.save_folder or "offload_index=", {*store.all_keys}
    if absent := [name for name in wanted if name in parameters and known.isdisjoint(tied.get(name, [name]))]:
        raise ValueError(
            f"{where} lacks {listed(absent)}, which {type(model).__name__} has on 'disk': it was written for another model or map. Pass an "
            f"empty folder."
        )
    for name, tensor in wanted.items():
        shape = tuple(store.index.get(name, {}).get("shape", tensor.shape))
        if shape != tuple(tensor.shape):
            raise ValueError(
                f"{where} has {name} in another shape, {shape} instead of {tuple(tensor.shape)} of this {type(model).__name__}: it was "
                f"written for another model. Pass an empty folder."
            )
    for name, tensor in found.items():
        if not tensor.is_meta and name in store and not same_bits(store[name], tensor):
            raise ValueError(
                f"{where} has other values of {name} than this {type(model).__name__}: it was written for another model, or before this one "
                f"was changed. Pass an empty folder; or a model on the meta device, which takes the values of the folder."
            )


def _joined(
    in_memory: Mapping[str, torch.Tensor],
    folder: str | os.PathLike[str] | None,
    index: Mapping[str, Mapping[str, Any]] | None,
) -> OffloadedWeightsLoader:
    if folder is not None and index:
        known = OffloadedWeightsLoader(save_folder=folder).index if (Path(folder) / INDEX).is_file() else {}
        return OffloadedWeightsLoader(in_memory, folder, {**known, **index})
    return OffloadedWeightsLoader(in_memory, folder, index)


def spread(
    model: M,
    places: Mapping[str, Place],
    main_device: DeviceLike | None,
    stored: Callable[[Sequence[Place]], Mapping[str, torch.Tensor]],
    offload_buffers: bool,
    skip_keys: str | Sequence[str] | None,
    preload_module_classes: Sequence[str] | None,
    force_hooks: bool,
) -> M:
    """Attaches the hooks by which a model runs in its places; `stored` gives the weights of those that are offloaded."""
    distinct = set(places.values())
    if len(distinct) == 1 and distinct != {"disk"} and not force_hooks:
        if empty := next((name for name, parameter in model.named_parameters() if parameter.is_meta), None):
            raise ValueError(
                f"{empty} has no value. Fill the model: load_checkpoint_and_dispatch(model, files, device_map)."
            )
        model.to(as_device(distinct.pop()))
        note_places(model, places)
        return model
    if main_device is None:
        main_device = main_place(places)
    offloaded = offloaded_places(main_device)
    weights = stored(offloaded)
    tied = find_tied_parameters(model)
    first = [model.get_parameter(names[0]) for names in tied]  # which is moved to each device once
    shared = TiedWeights(tied)
    shared.keep_resident(model, lambda name: place_of(name, places) in offloaded)
    blocks = {**without_nesting(model, places), **dict.fromkeys(unplaced(model, places), main_device)}
    attach_align_device_hook_on_blocks(
        model,
        {name: main_device if place in offloaded else place for name, place in blocks.items()},
        {name: place in offloaded for name, place in blocks.items()},
        weights_map=weights,
        offload_buffers=offload_buffers,
        skip_keys=skip_keys,
        preload_module_classes=preload_module_classes,
        tied_params_map={each.data_ptr(): {} for each in first if not each.is_meta and each.numel()},
        prefetcher=Prefetcher(shared),
    )
    if not any(place in offloaded for place in distinct):
        retie_parameters(model, tied)
    note_places(model, places)
    model.to = partial(_refuse_to_move, type(model).__name__)  # type: ignore[method-assign]
    return model


def note_places(model: nn.Module, places: Mapping[str, Place]) -> None:
    """Notes on a model where it is, for libraries that ask."""
    setattr(model, "hf_device_map", dict(places))  # noqa: B010  (a plain attribute, not a module or tensor)


def beside_memory(
    model: nn.Module, places: Mapping[str, Place], store: Mapping[str, torch.Tensor], offloaded: Sequence[Place]
) -> Mapping[str, torch.Tensor]:
    """The store, behind what is offloaded to main memory: that is there, and not read again."""
    if "cpu" not in offloaded:
        return store
    own = {name: value for name, value in tensors_of(model).items() if place_of(name, places) == "cpu"}
    in_memory = {name: value.detach() for name, value in own.items() if not value.is_meta}
    return ChainMap(in_memory, cast("dict[str, torch.Tensor]", store))


def _refuse_to_move(model: str, *args: object, **kwargs: object) -> NoReturn:  # noqa: ARG001  (whatever `to` is given)
    """Stands in for `to` of a model that is spread over places."""
    raise RuntimeError(
        f"to() was called on a {model} that is spread over several places: it stays where hf_device_map says. Build the model anew, and "
        f"load or dispatch that by another device_map."
    )


def cpu_offload(
    model: M,
    execution_device: DeviceLike | None = None,
    offload_buffers: bool = False,
    state_dict: Mapping[str, torch.Tensor] | None = None,
    preload_module_classes: Sequence[str] | None = None,
) -> M:
    """Keeps a model's weights in main memory; each call brings its module's. In place; returns it.

    `execution_device` None: where the first parameter is. Other arguments: see `dispatch_model`.
    """
    refuse_dispatched(model)
    if execution_device is None:
        execution_device = next(iter(model.parameters())).device
    if state_dict is None:
        state_dict = {name: value.detach().to("cpu") for name, value in tensors_of(model).items()}
    return _offloaded(model, execution_device, state_dict, offload_buffers, preload_module_classes)


def disk_offload(
    model: M,
    offload_dir: str | os.PathLike[str],
    execution_device: DeviceLike | None = None,
    offload_buffers: bool = False,
    preload_module_classes: Sequence[str] | None = None,
) -> M:
    """Keeps a model's weights in a folder, written if it has no index; see `cpu_offload`."""
    refuse_dispatched(model)
    state = tensors_of(model)
    if anew := not (Path(offload_dir) / INDEX).is_file():
        offload_state_dict(offload_dir, state)
    if execution_device is None:
        execution_device = next(iter(model.parameters())).device
    weights = OffloadedWeightsLoader(save_folder=offload_dir)
    _check_folder(model, state, weights, {} if anew else state)
    return _offloaded(model, execution_device, weights, offload_buffers, preload_module_classes)


def _offloaded(
    model: M,
    device: DeviceLike,
    weights: Mapping[str, torch.Tensor],
    offload_buffers: bool,
    preload_module_classes: Sequence[str] | None,
) -> M:
    add_hook_to_module(model, AlignDevicesHook(device, io_same_device=True), append=True)
    attach_align_device_hook(
        model,
        execution_device=device,
        offload=True,
        offload_buffers=offload_buffers,
        weights_map=weights,
        preload_module_classes=preload_module_classes,
        prefetcher=Prefetcher(TiedWeights(find_tied_parameters(model))),
    )
    look_for_empty(model)
    return model


def cpu_offload_with_hook(
    model: M, execution_device: DeviceLike | None = None, prev_module_hook: UserCpuOffloadHook | None = None
) -> tuple[M, UserCpuOffloadHook]:
    """Brings a whole model to the device for its call, until the next of the chain is called.

        encoder, hook = cpu_offload_with_hook(encoder)
        decoder, hook = cpu_offload_with_hook(decoder, prev_module_hook=hook)
        ...
        hook.offload()          # the last one goes by hand

    Returns the model and the hook that the next call takes.
    """
    hook = CpuOffload(execution_device, prev_module_hook)
    add_hook_to_module(model, hook, append=True)
    return model, UserCpuOffloadHook(model, hook)
