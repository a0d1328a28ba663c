"""The classes of configuration files."""

from __future__ import annotations

from accel_compat.commands.config_file import (
    BaseConfig,
    ClusterConfig,
    SageMakerConfig,
    cache_dir,
    default_config_file,
    default_json_config_file,
    default_yaml_config_file,
    load_config_from_file,
)
from accel_compat.missing_names import refuse_from

__all__ = [
    "BaseConfig",
    "ClusterConfig",
    "SageMakerConfig",
    "cache_dir",
    "default_config_file",
    "default_json_config_file",
    "default_yaml_config_file",
    "load_config_from_file",
]

__getattr__ = refuse_from(__name__)
