"""Which modules get a hook that brings weights and inputs, and with which options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from accel_big_model.align_hook import AlignDevicesHook, DeviceLike, Tied
from accel_big_model.hooks import add_hook_to_module
from accel_big_model.module_tensors import joined, named_module_tensors
from accel_big_model.weights import PrefixedDataset

if TYPE_CHECKING:
    from accel_big_model.prefetch import Prefetcher


def attach_execution_device_hook(
    module: nn.Module,
    execution_device: DeviceLike,
    skip_keys: str | Sequence[str] | None = None,
    preload_module_classes: Sequence[str] | None = None,
    tied_params_map: Tied | None = None,
) -> None:
    """Has every submodule with weights bring its inputs to the device, unless it has a hook."""
    if not hasattr(module, "_hf_hook") and len(module.state_dict()) > 0:
        hook = AlignDevicesHook(execution_device, skip_keys=skip_keys, tied_params_map=tied_params_map)
        add_hook_to_module(module, hook)
    if type(module).__name__ not in (preload_module_classes or ()):
        for child in module.children():
            attach_execution_device_hook(child, execution_device, skip_keys, preload_module_classes, tied_params_map)


def attach_align_device_hook(
    module: nn.Module,
    execution_device: DeviceLike | None = None,
    offload: bool = False,
    weights_map: Mapping[str, torch.Tensor] | None = None,
    offload_buffers: bool = False,
    module_name: str = "",
    skip_keys: str | Sequence[str] | None = None,
    preload_module_classes: Sequence[str] | None = None,
    tied_params_map: Tied | None = None,
    prefetcher: Prefetcher | None = None,
) -> None:
    """Attaches an `AlignDevicesHook` to every submodule with weights of its own.

    `preload_module_classes`: names of classes whose weights are brought together, because their
    forward uses those of submodules without calling them. `weights_map` has names from the root,
    of which `module_name` is that of `module`. The other arguments are those of the hook.
    """
    seen = set[nn.Module]()

    def attach(each: nn.Module, name: str) -> None:
        if each in seen:  # under another name
            return
        seen.add(each)
        together = offload and type(each).__name__ in (preload_module_classes or ())
        if together or next(named_module_tensors(each), None) is not None:
            hook = AlignDevicesHook(
                execution_device,
                offload=offload,
                weights_map=_below(name, weights_map),
                offload_buffers=offload_buffers,
                place_submodules=together,
                skip_keys=skip_keys,
                tied_params_map=tied_params_map,
                prefetcher=prefetcher,
            )
            add_hook_to_module(each, hook, append=True)
        if not together:
            for own, child in each.named_children():
                attach(child, joined(name, own))

    attach(module, module_name)


def attach_align_device_hook_on_blocks(
    module: nn.Module,
    execution_device: DeviceLike | Mapping[str, DeviceLike | None] | None = None,
    offload: bool | Mapping[str, bool] = False,
    weights_map: Mapping[str, torch.Tensor] | None = None,
    offload_buffers: bool = False,
    module_name: str = "",
    skip_keys: str | Sequence[str] | None = None,
    preload_module_classes: Sequence[str] | None = None,
    tied_params_map: Tied | None = None,
    prefetcher: Prefetcher | None = None,
) -> None:
    """Attaches hooks to blocks in several places: dicts of block names → device, or → offloaded.

    With one device and one answer the whole module is one block. The outputs of the outermost
    module go back to where its inputs were.
    """
    devices: Mapping[str, Any]
    if isinstance(execution_device, Mapping):
        devices = execution_device
    else:
        devices = dict.fromkeys(offload if isinstance(offload, Mapping) else [module_name], execution_device)
    offloads = offload if isinstance(offload, Mapping) else dict.fromkeys(devices, offload)
    aligned = partial(AlignDevicesHook, skip_keys=skip_keys, tied_params_map=tied_params_map)

    seen = set[nn.Module]()

    def attach(each: nn.Module, name: str) -> None:
        if each in seen:  # under another name, which has the same place
            return
        seen.add(each)
        if name in devices:
            attach_block(each, name, devices[name], offloads.get(name, False))
        elif not name:
            add_hook_to_module(each, aligned(None, io_same_device=True), append=True)
        if name not in devices:
            attach_own(each, name)
        for own, child in each.named_children():
            inner = joined(name, own)
            if any(block == inner or block.startswith(f"{inner}.") for block in devices):
                attach(child, inner)

    def attach_own(each: nn.Module, name: str) -> None:
        """For a module whose weights have places of their own: some may be offloaded, others stay in theirs."""
        placed = [tensor for tensor, _ in named_module_tensors(each) if joined(name, tensor) in devices]
        own = [tensor for tensor in placed if offloads.get(joined(name, tensor), False)]
        for device in dict.fromkeys(devices[joined(name, tensor)] for tensor in placed if tensor not in own):
            kept = [tensor for tensor in placed if tensor not in own and devices[joined(name, tensor)] == device]
            add_hook_to_module(each, aligned(device, names=kept), append=True)
        if own:
            hook = aligned(
                devices[joined(name, own[0])],
                offload=True,
                weights_map=_below(name, weights_map),
                offload_buffers=offload_buffers,
                prefetcher=prefetcher,
                names=own,
            )
            add_hook_to_module(each, hook, append=True)

    def attach_block(block: nn.Module, name: str, device: Any, is_offloaded: bool) -> None:
        if is_offloaded:
            attach_align_device_hook(
                block,
                device,
                True,
                weights_map,
                offload_buffers,
                name,
                skip_keys,
                preload_module_classes,
                tied_params_map,
                prefetcher,
            )
        if not is_offloaded or not hasattr(block, "_hf_hook"):
            hook = aligned(device, io_same_device=not name, place_submodules=not is_offloaded)
            add_hook_to_module(block, hook)
        elif not name:  # one more hook would look for the values of what the first has taken away
            getattr(block._hf_hook, "hooks", [block._hf_hook])[-1].io_same_device = True
        if device is not None:
            attach_execution_device_hook(block, device, skip_keys, preload_module_classes, tied_params_map)

    attach(module, module_name)
    if any(offloads.values()):
        look_for_empty(module)


def look_for_empty(model: nn.Module) -> None:
    """Has the hook of a model, if there is one, look for modules without values, before the model is called."""
    if (hook := getattr(model, "_hf_hook", None)) is not None:
        getattr(hook, "hooks", [hook])[-1].outermost = True


def _below(name: str, weights: Mapping[str, torch.Tensor] | None) -> PrefixedDataset | None:
    """The weights of a module, by their names in it."""
    return None if weights is None else PrefixedDataset(weights, f"{name}." if name else "")
