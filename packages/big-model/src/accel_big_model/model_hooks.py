"""Hooks that act on all weights of a module: they go to a device, or to another dtype, for its calls."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from accel_big_model.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from accel_big_model.module_tensors import as_device, joined
from accel_core.api.component import map_tensors

if TYPE_CHECKING:
    from collections.abc import Sequence

    from accel_big_model.align_hook import DeviceLike


class CpuOffload(ModelHook):
    """Brings a whole model to a device when it is called, and leaves it there until another one is.

    Args:
        execution_device: None: the accelerator, or the CPU where there is none.
        prev_module_hook: that of the model that ran before, which goes to main memory first.
    """

    def __init__(
        self, execution_device: DeviceLike | None = None, prev_module_hook: UserCpuOffloadHook | None = None
    ) -> None:
        self.execution_device = default_device() if execution_device is None else as_device(execution_device)
        self.prev_module_hook = prev_module_hook

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Sends the model to main memory."""
        return module.to("cpu")

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Brings the model, after the one before has gone."""
        if self.prev_module_hook is not None and self.prev_module_hook.hook is not self:
            before = self.prev_module_hook.model
            parameter = next(before.parameters(), None)
            if parameter is not None and parameter.device.type != "cpu":
                self.prev_module_hook.offload()
        module.to(self.execution_device)
        args, kwargs = map_tensors(lambda tensor: tensor.to(self.execution_device), (args, kwargs))
        return args, kwargs


class UserCpuOffloadHook:
    """The handle of `cpu_offload_with_hook`: sends its model away, or stops bringing it."""

    def __init__(self, model: nn.Module, hook: ModelHook) -> None:
        self.model, self.hook = model, hook

    def offload(self) -> None:
        """Sends the model to main memory."""
        self.hook.init_hook(self.model)

    def remove(self) -> None:
        """Removes the hook: the model stays where it is."""
        remove_hook_from_module(self.model)


class LayerwiseCastingHook(ModelHook):
    """Keeps the weights of a module in a small dtype, and casts them for each call."""

    def __init__(self, storage_dtype: torch.dtype, compute_dtype: torch.dtype, non_blocking: bool = False) -> None:
        self.storage_dtype, self.compute_dtype, self.non_blocking = storage_dtype, compute_dtype, non_blocking
        self._is_cast = False

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Casts the weights to the dtype in which they are kept."""
        return module.to(dtype=self.storage_dtype, non_blocking=self.non_blocking)

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Casts the weights for the call."""
        self._is_cast = True
        module.to(dtype=self.compute_dtype, non_blocking=self.non_blocking)
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Casts the weights back."""
        self.end(module)
        return output

    def end(self, module: nn.Module) -> None:
        """Casts the weights back, also after an error."""
        if self._is_cast:
            module.to(dtype=self.storage_dtype, non_blocking=self.non_blocking)
            self._is_cast = False


def attach_layerwise_casting_hooks(
    module: nn.Module,
    storage_dtype: torch.dtype,
    compute_dtype: torch.dtype,
    skip_modules_pattern: str | Sequence[str] | None = None,
    skip_modules_classes: Sequence[type[nn.Module]] | None = None,
    non_blocking: bool = False,
) -> None:
    """Keeps weights of linear, convolution and embedding layers in `storage_dtype`; casts per call.

    `skip_modules_pattern`: regular expressions; modules whose names they are found in are left
    alone, with what they hold. `skip_modules_classes`: the same by class.
    """
    patterns = [skip_modules_pattern] if isinstance(skip_modules_pattern, str) else list(skip_modules_pattern or ())
    classes = tuple(skip_modules_classes or ())

    def walk(each: nn.Module, name: str) -> None:
        if isinstance(each, classes) or any(re.search(pattern, name) for pattern in patterns):
            return
        if isinstance(each, _CAST):
            add_hook_to_module(each, LayerwiseCastingHook(storage_dtype, compute_dtype, non_blocking), append=True)
            return
        for own, child in each.named_children():
            walk(child, joined(name, own))

    walk(module, "")


_CAST = (
    nn.Linear,
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
    nn.Embedding,
)
"""The layers whose weights are worth casting."""


def default_device() -> torch.device:
    """The accelerator, or the CPU where there is none."""
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
