"""Models that are larger than a device."""

from accel_big_model import (
    attach_layerwise_casting_hooks,
    check_device_map,
    cpu_offload,
    cpu_offload_with_hook,
    disk_offload,
    dispatch_model,
    find_tied_parameters,
    infer_auto_device_map,
    init_empty_weights,
    init_on_device,
    load_checkpoint_and_dispatch,
    load_checkpoint_in_model,
    retie_parameters,
)
from accel_compat.missing_names import refuse_from

__getattr__ = refuse_from(__name__)

__all__ = [
    "attach_layerwise_casting_hooks", "check_device_map", "cpu_offload", "cpu_offload_with_hook", "disk_offload",
    "dispatch_model", "find_tied_parameters", "infer_auto_device_map", "init_empty_weights", "init_on_device",
    "load_checkpoint_and_dispatch", "load_checkpoint_in_model", "retie_parameters",
]  # fmt: skip
