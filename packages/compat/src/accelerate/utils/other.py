"""Functions without a subject in common."""

from accel_compat.commands.config import write_basic_config
from accel_compat.missing_names import refuse_from
from accel_compat.modules import (
    compile_regions,
    compile_regions_deepspeed,
    compile_regions_fsdp2,
    extract_model_from_parallel,
    get_model_tp_size,
    get_module_children_bottom_up,
    has_compiled_regions,
    has_repeated_blocks,
    is_compiled_module,
    is_repeated_blocks,
    model_has_dtensor,
)
from accel_compat.run_helpers import load, save, wait_for_everyone
from accel_compat.small_helpers import (
    check_os_kernel,
    clean_state_dict_for_safetensors,
    convert_bytes,
    get_free_port,
    get_pretty_name,
    is_port_in_use,
    merge_dicts,
    recursive_getattr,
)

__getattr__ = refuse_from(__name__)

__all__ = [
    "check_os_kernel", "clean_state_dict_for_safetensors", "compile_regions", "compile_regions_deepspeed",
    "compile_regions_fsdp2", "convert_bytes", "extract_model_from_parallel", "get_free_port", "get_model_tp_size",
    "get_module_children_bottom_up", "get_pretty_name", "has_compiled_regions", "has_repeated_blocks",
    "is_compiled_module", "is_port_in_use", "is_repeated_blocks", "load", "merge_dicts", "model_has_dtensor",
    "recursive_getattr", "save", "wait_for_everyone", "write_basic_config",
]  # fmt: skip
