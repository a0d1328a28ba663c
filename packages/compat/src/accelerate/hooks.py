"""Hooks around the forward of modules."""

from accel_big_model import (
    AlignDevicesHook,
    CpuOffload,
    LayerwiseCastingHook,
    ModelHook,
    SequentialHook,
    UserCpuOffloadHook,
    add_hook_to_module,
    attach_align_device_hook,
    attach_align_device_hook_on_blocks,
    attach_execution_device_hook,
    remove_hook_from_module,
    remove_hook_from_submodules,
)
from accel_compat.missing_names import refuse_from

__getattr__ = refuse_from(__name__)

__all__ = [
    "AlignDevicesHook", "CpuOffload", "LayerwiseCastingHook", "ModelHook", "SequentialHook", "UserCpuOffloadHook",
    "add_hook_to_module", "attach_align_device_hook", "attach_align_device_hook_on_blocks",
    "attach_execution_device_hook", "remove_hook_from_module", "remove_hook_from_submodules",
]  # fmt: skip
