"""The environment of the process."""

from accel_compat.missing_names import refuse_from
from accel_compat.process_environment import (
    CPUInformation,
    are_libraries_initialized,
    check_cuda_fp8_capability,
    check_cuda_p2p_ib_support,
    clear_environment,
    convert_dict_to_env_variables,
    get_cpu_distributed_information,
    get_current_device_type,
    get_driver_version,
    get_gpu_info,
    get_int_from_env,
    override_numa_affinity,
    parse_choice_from_env,
    parse_flag_from_env,
    patch_environment,
    purge_accelerate_environment,
    set_numa_affinity,
    str_to_bool,
)

__getattr__ = refuse_from(__name__)

__all__ = [
    "CPUInformation", "are_libraries_initialized", "check_cuda_fp8_capability", "check_cuda_p2p_ib_support",
    "clear_environment", "convert_dict_to_env_variables", "get_cpu_distributed_information",
    "get_current_device_type", "get_driver_version", "get_gpu_info", "get_int_from_env", "override_numa_affinity",
    "parse_choice_from_env", "parse_flag_from_env", "patch_environment", "purge_accelerate_environment",
    "set_numa_affinity", "str_to_bool",
]  # fmt: skip
