"""Which modules get a hook that brings weights and inputs, and with which options."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from accel_big_model.align_hook import AlignDevicesHook, DeviceLike, Tied
from accel_big_model.hooks import add_hook_to_module, hooks_of
from accel_big_model.module_tensors import is_below, joined, named_module_tensors
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
    everywhere = {"skip_keys": skip_keys, "tied_params_map": tied_params_map}
    offloading = {"weights_map": weights_map, "offload_buffers": offload_buffers, "prefetcher": prefetcher}
    _Blocks(devices, offloads, preload_module_classes, everywhere, offloading).attach(module, module_name)
    if any(offloads.values()):
        look_for_empty(module)


@dataclass(frozen=True)
class _Blocks:
    """Blocks by name, and the options of hooks: of all, and of those that bring weights."""

    devices: Mapping[str, DeviceLike | None]
    offloads: Mapping[str, bool]
    preload: Sequence[str] | None
    everywhere: Mapping[str, Any]
    offloading: Mapping[str, Any]
    seen: set[nn.Module] = field(default_factory=set)

    def attach(self, module: nn.Module, name: str) -> None:
        """Attaches hooks to a module if it is a block, to the blocks in it, and to the root."""
        if module in self.seen:  # under another name, which has the same place
            return
        self.seen.add(module)
        if name in self.devices:
            self._attach_block(module, name, self.devices[name], self.offloads.get(name, False))
        else:
            if not name:
                add_hook_to_module(module, AlignDevicesHook(io_same_device=True, **self.everywhere), append=True)
            self._attach_to_tensors(module, name)
        for own, child in module.named_children():
            inner = joined(name, own)
            if any(is_below(block, inner) for block in self.devices):
                self.attach(child, inner)

    def _attach_to_tensors(self, module: nn.Module, name: str) -> None:
        """For a module whose weights have places of their own: some may be offloaded, others stay in theirs."""
        groups: dict[tuple[bool, Any], list[str]] = defaultdict(list)
        for own, _ in named_module_tensors(module):
            if (full := joined(name, own)) in self.devices:
                groups[self.offloads.get(full, False), self.devices[full]].append(own)
        for (is_offloaded, device), names in sorted(groups.items(), key=lambda group: group[0][0]):
            options = dict(self.everywhere)
            if is_offloaded:
                options |= {**self.offloading, "weights_map": _below(name, self.offloading["weights_map"])}
            add_hook_to_module(
                module, AlignDevicesHook(device, offload=is_offloaded, names=names, **options), append=True
            )

    def _attach_block(self, block: nn.Module, name: str, device: DeviceLike | None, is_offloaded: bool) -> None:
        if is_offloaded:
            attach_align_device_hook(
                block,
                device,
                offload=True,
                module_name=name,
                preload_module_classes=self.preload,
                **self.everywhere,
                **self.offloading,
            )
        if not is_offloaded or not hooks_of(block):
            hook = AlignDevicesHook(
                device, io_same_device=not name, place_submodules=not is_offloaded, **self.everywhere
            )
            add_hook_to_module(block, hook)
        elif not name:  # one more hook would look for the values of what the first has taken away
            hooks_of(block)[-1].io_same_device = True
        if device is not None:
            attach_execution_device_hook(block, device, preload_module_classes=self.preload, **self.everywhere)


def look_for_empty(model: nn.Module) -> None:
    """Has the hook of a model, if there is one, look for modules without values, before the model is called."""
    for hook in hooks_of(model)[-1:]:
        hook.outermost = True


def _below(name: str, weights: Mapping[str, torch.Tensor] | None) -> PrefixedDataset | None:
    """The weights of a module, by their names in it."""
    return None if weights is None else PrefixedDataset(weights, f"{name}." if name else "")
