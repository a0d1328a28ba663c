"""Operations of all processes together, and functions over nested tensors."""

from accel_compat.missing_names import refuse_from
from accel_compat.nested import (
    TensorInformation,
    concatenate,
    convert_to_fp32,
    find_batch_size,
    find_device,
    get_data_structure,
    get_shape,
    honor_type,
    ignorant_find_batch_size,
    initialize_tensors,
    is_namedtuple,
    is_tensor_information,
    is_torch_tensor,
    listify,
    recursively_apply,
    send_to_device,
    slice_tensors,
)
from accel_compat.operations import (
    CannotPadNestedTensorWarning,
    ConvertOutputsToFp32,
    DistributedOperationException,
    GatheredParameters,
    convert_outputs_to_fp32,
    copy_tensor_to_devices,
    gather_object,
    gather_tensor_shape,
    pad_across_processes,
    reduce,
)
from accel_core import broadcast, broadcast_object_list, gather, pad_input_tensors

__getattr__ = refuse_from(__name__)

__all__ = [
    "CannotPadNestedTensorWarning", "ConvertOutputsToFp32", "DistributedOperationException", "GatheredParameters",
    "TensorInformation", "broadcast", "broadcast_object_list", "concatenate", "convert_outputs_to_fp32",
    "convert_to_fp32", "copy_tensor_to_devices", "find_batch_size", "find_device", "gather", "gather_object",
    "gather_tensor_shape", "get_data_structure", "get_shape", "honor_type", "ignorant_find_batch_size",
    "initialize_tensors", "is_namedtuple", "is_tensor_information", "is_torch_tensor", "listify",
    "pad_across_processes", "pad_input_tensors", "recursively_apply", "reduce", "send_to_device", "slice_tensors",
]  # fmt: skip
