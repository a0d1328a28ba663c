"""Sizes, places and tensors of models."""

from accel_big_model import (
    align_module_device,
    calculate_maximum_sizes,
    check_device_map,
    clean_device_map,
    compute_module_sizes,
    convert_file_size_to_int,
    dtype_byte_size,
    find_tied_parameters,
    get_balanced_memory,
    get_max_layer_size,
    get_max_memory,
    get_state_dict_offloaded_model,
    has_offloaded_params,
    infer_auto_device_map,
    load_checkpoint_in_model,
    load_offloaded_weights,
    named_module_tensors,
    retie_parameters,
    set_module_tensor_to_device,
)
from accel_compat.missing_names import refuse_from
from accel_compat.model_files import (
    check_device_same,
    check_tied_parameters_on_same_device,
    compute_module_total_buffer_size,
    get_non_persistent_buffers,
    load_state_dict,
)
from accel_compat.modules import is_peft_model
from accel_compat.small_helpers import id_tensor_storage

__getattr__ = refuse_from(__name__)

__all__ = [
    "align_module_device", "calculate_maximum_sizes", "check_device_map", "check_device_same",
    "check_tied_parameters_on_same_device", "clean_device_map", "compute_module_sizes",
    "compute_module_total_buffer_size", "convert_file_size_to_int", "dtype_byte_size", "find_tied_parameters",
    "get_balanced_memory", "get_max_layer_size", "get_max_memory", "get_non_persistent_buffers",
    "get_state_dict_offloaded_model", "has_offloaded_params", "id_tensor_storage", "infer_auto_device_map",
    "is_peft_model", "load_checkpoint_in_model", "load_offloaded_weights", "load_state_dict", "named_module_tensors",
    "retie_parameters", "set_module_tensor_to_device",
]  # fmt: skip
