"""Weights and optimizer states under FSDP."""

from accel_compat.constants import FSDP_MODEL_NAME, OPTIMIZER_NAME
from accel_compat.fsdp_weights import (
    disable_fsdp_ram_efficient_loading,
    enable_fsdp_ram_efficient_loading,
    load_fsdp_model,
    load_fsdp_optimizer,
    merge_fsdp_weights,
    save_fsdp_model,
    save_fsdp_optimizer,
)
from accel_compat.missing_names import refuse_from
from accel_compat.modules import get_parameters_from_modules

__getattr__ = refuse_from(__name__)

__all__ = [
    "FSDP_MODEL_NAME", "OPTIMIZER_NAME", "disable_fsdp_ram_efficient_loading", "enable_fsdp_ram_efficient_loading",
    "get_parameters_from_modules", "load_fsdp_model", "load_fsdp_optimizer", "merge_fsdp_weights", "save_fsdp_model",
    "save_fsdp_optimizer",
]  # fmt: skip
