"""Models that fit no single device: built without memory, placed, filled from their files, and run.

Read in this order:

    meta_init       building without memory
    sizes, memory   what modules take, and what places have
    device_map      what goes where
    shortage        what did not fit, and why
    loading         weights from files to their places
    filling         the same without hooks
    quantized_loading, quantizers, quantized_weights    the same with linear layers quantised
    dispatch        a model that is spread over places
    strategy        Accelerator(strategy="dispatch")
    hooks           what happens around a module's forward
    align_hook, attachment, prefetch    how weights come to where they compute; which modules have that
    tied_weights    weights that come once for several names
    weights, host_buffers, offloaded_parameter    where they are meanwhile, in which memory, and what stands for them
    unchanged_files files that must stay as they are
    whole_state     all weights of an offloaded model
    model_hooks     hooks that move or cast all weights of a module
    module_tensors  the tensors of a model by name
    estimate        memory that training takes, by dtype and strategy; a room of its own
    planning        the simplest way to train that fits, and its configuration
"""

from __future__ import annotations

from accel_big_model.align_hook import AlignDevicesHook, align_module_device, has_offloaded_params
from accel_big_model.attachment import (
    attach_align_device_hook,
    attach_align_device_hook_on_blocks,
    attach_execution_device_hook,
)
from accel_big_model.device_map import check_device_map, clean_device_map, infer_auto_device_map
from accel_big_model.dispatch import (
    cpu_offload,
    cpu_offload_with_hook,
    disk_offload,
    dispatch_model,
)
from accel_big_model.estimate.estimating import estimate_memory
from accel_big_model.estimate.result import MemoryEstimate, StrategyEstimate
from accel_big_model.filling import load_checkpoint_in_model
from accel_big_model.hooks import (
    ModelHook,
    SequentialHook,
    add_hook_to_module,
    remove_hook_from_module,
    remove_hook_from_submodules,
)
from accel_big_model.loading import load_checkpoint_and_dispatch
from accel_big_model.memory import get_balanced_memory, get_max_memory
from accel_big_model.meta_init import init_empty_weights, init_on_device
from accel_big_model.model_hooks import (
    CpuOffload,
    LayerwiseCastingHook,
    UserCpuOffloadHook,
    attach_layerwise_casting_hooks,
)
from accel_big_model.module_tensors import (
    find_tied_parameters,
    named_module_tensors,
    retie_parameters,
    set_module_tensor_to_device,
)
from accel_big_model.planning.choosing import TrainingPlan, plan_training
from accel_big_model.quantized_loading import load_and_quantize_model
from accel_big_model.quantizers import BnbQuantizationConfig
from accel_big_model.sizes import (
    calculate_maximum_sizes,
    compute_module_sizes,
    convert_file_size_to_int,
    dtype_byte_size,
    get_max_layer_size,
)
from accel_big_model.strategy import Dispatch
from accel_big_model.weights import (
    OffloadedWeightsLoader,
    PrefixedDataset,
    extract_submodules_state_dict,
    load_offloaded_weight,
    load_offloaded_weights,
    offload_state_dict,
    offload_weight,
    save_offload_index,
)
from accel_big_model.whole_state import get_state_dict_offloaded_model

__all__ = [
    "AlignDevicesHook",
    "BnbQuantizationConfig",
    "CpuOffload",
    "Dispatch",
    "LayerwiseCastingHook",
    "MemoryEstimate",
    "ModelHook",
    "OffloadedWeightsLoader",
    "PrefixedDataset",
    "SequentialHook",
    "StrategyEstimate",
    "TrainingPlan",
    "UserCpuOffloadHook",
    "add_hook_to_module",
    "align_module_device",
    "attach_align_device_hook",
    "attach_align_device_hook_on_blocks",
    "attach_execution_device_hook",
    "attach_layerwise_casting_hooks",
    "calculate_maximum_sizes",
    "check_device_map",
    "clean_device_map",
    "compute_module_sizes",
    "convert_file_size_to_int",
    "cpu_offload",
    "cpu_offload_with_hook",
    "disk_offload",
    "dispatch_model",
    "dtype_byte_size",
    "estimate_memory",
    "extract_submodules_state_dict",
    "find_tied_parameters",
    "get_balanced_memory",
    "get_max_layer_size",
    "get_max_memory",
    "get_state_dict_offloaded_model",
    "has_offloaded_params",
    "infer_auto_device_map",
    "init_empty_weights",
    "init_on_device",
    "load_and_quantize_model",
    "load_checkpoint_and_dispatch",
    "load_checkpoint_in_model",
    "load_offloaded_weight",
    "load_offloaded_weights",
    "named_module_tensors",
    "offload_state_dict",
    "offload_weight",
    "plan_training",
    "remove_hook_from_module",
    "remove_hook_from_submodules",
    "retie_parameters",
    "save_offload_index",
    "set_module_tensor_to_device",
]

__version__ = "0.1.0"
