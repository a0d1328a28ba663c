"""Configuration files of `accelerate`: classes with their keys, read and written as YAML or JSON."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from accel_compat.commands.options import truth
from accel_core import DistributedType
from accel_launch import peer_paths

_Config = TypeVar("_Config", bound="BaseConfig")
_SAGEMAKER = "AMAZON_SAGEMAKER"

cache_dir = str(peer_paths(os.environ)[0].parent)
default_yaml_config_file = str(Path(cache_dir) / "default_config.yaml")
default_json_config_file = default_yaml_config_file
default_config_file = default_yaml_config_file
if not os.path.isfile(default_config_file) and os.path.isfile(Path(cache_dir) / "default_config.json"):
    default_config_file = str(Path(cache_dir) / "default_config.json")


def present_file() -> str | None:
    """The path of the user's file, at the first of the places where it may be; None if there is none."""
    return next((str(path) for path in peer_paths(os.environ) if path.is_file()), None)


@dataclass
class BaseConfig:
    """What every file has. The values are texts, numbers and mappings, as in the file."""

    compute_environment: str
    distributed_type: str
    mixed_precision: str | None
    use_cpu: bool
    debug: bool

    def __post_init__(self) -> None:
        self.distributed_type = DistributedType(str(self.distributed_type))
        for each in fields(self):
            value = getattr(self, each.name)
            if value is None and each.name.endswith("_config"):
                setattr(self, each.name, {})
            elif isinstance(each.default, bool) and isinstance(value, str):
                setattr(self, each.name, truth(value))

    def to_dict(self) -> dict[str, Any]:
        """The content of the file, without what is not set, texts being plain texts."""
        content = {each.name: getattr(self, each.name) for each in fields(self)}
        return {key: _plain(value) for key, value in content.items() if value not in (None, {})}

    @classmethod
    def from_dict(cls: type[_Config], data: Mapping[str, Any], path: str = "the configuration") -> _Config:
        """The configuration that a file's content says; `ValueError` for keys that it does not have."""
        content = dict(data)
        content.setdefault("compute_environment", "LOCAL_MACHINE")
        if "distributed_type" not in content:
            raise ValueError(f"{path} has no distributed_type. Add one, such as `distributed_type: NO`.")
        if content["distributed_type"] is False:
            content["distributed_type"] = "NO"
        is_cluster = "num_processes" in cls.__dataclass_fields__
        if is_cluster and "num_processes" not in content and content["distributed_type"] == "NO":
            content["num_processes"] = 1
        older = truth(str(content.pop("fp16", False)))
        content.setdefault("mixed_precision", "fp16" if older else None)
        if content["mixed_precision"] is False:  # `no`, as YAML 1.1 reads it
            content["mixed_precision"] = "no"
        if "dynamo_backend" in content:
            backend = content.pop("dynamo_backend")
            silent = str(backend).upper() in {"NO", "FALSE"}
            content.setdefault("dynamo_config", {} if silent else {"dynamo_backend": backend})
        content.setdefault("use_cpu", False)
        content.setdefault("debug", False)
        unknown = sorted(content.keys() - {each.name for each in fields(cls)})
        if unknown:
            raise ValueError(
                f"{path} has keys that `accelerate` does not know: {', '.join(unknown)}. Take them out, or type "
                f"`accel config import {path}`, which says what becomes of each key."
            )
        return cls(**content)

    @classmethod
    def from_yaml_file(cls: type[_Config], yaml_file: str | None = None) -> _Config:
        """Reads a file, YAML or JSON; None: the user's own."""
        path = yaml_file or default_config_file
        return cls.from_dict(read(path), path)

    from_json_file = from_yaml_file

    def to_yaml_file(self, yaml_file: str) -> None:
        """Writes a file of YAML."""
        write(yaml_file, self.to_dict())

    def to_json_file(self, json_file: str) -> None:
        """Writes a file of JSON."""
        Path(json_file).write_text(json.dumps(self.to_dict(), indent=2, sort_keys=True) + "\n", encoding="utf-8")


@dataclass
class ClusterConfig(BaseConfig):
    """A file for machines that are there."""

    num_processes: int = -1
    machine_rank: int = 0
    num_machines: int = 1
    gpu_ids: str | None = None
    main_process_ip: str | None = None
    main_process_port: int | None = None
    rdzv_backend: str | None = "static"
    same_network: bool = False
    main_training_function: str = "main"
    enable_cpu_affinity: bool = False
    fp8_config: dict[str, Any] = field(default_factory=dict)
    deepspeed_config: dict[str, Any] = field(default_factory=dict)
    fsdp_config: dict[str, Any] = field(default_factory=dict)
    parallelism_config: dict[str, Any] = field(default_factory=dict)
    megatron_lm_config: dict[str, Any] = field(default_factory=dict)
    mpirun_config: dict[str, Any] = field(default_factory=dict)
    downcast_bf16: bool = False
    tpu_name: str | None = None
    tpu_zone: str | None = None
    tpu_use_cluster: bool = False
    tpu_use_sudo: bool = False
    command_file: str | None = None
    commands: list[str] | None = None
    tpu_vm: list[str] | None = None
    tpu_env: list[str] | None = None
    dynamo_config: dict[str, Any] = field(default_factory=dict)


@dataclass
class SageMakerConfig(BaseConfig):
    """A file for a service that starts jobs. It can be read and shown; nothing is started by it."""

    ec2_instance_type: str
    iam_role_name: str
    image_uri: str | None = None
    profile: str | None = None
    region: str = "us-east-1"
    num_machines: int = 1
    gpu_ids: str = "all"
    base_job_name: str = "accelerate-sagemaker-1"
    pytorch_version: str | None = None
    transformers_version: str | None = None
    py_version: str | None = None
    sagemaker_inputs_file: str | None = None
    sagemaker_metrics_file: str | None = None
    additional_args: dict[str, Any] | None = None
    dynamo_config: dict[str, Any] = field(default_factory=dict)
    enable_cpu_affinity: bool = False


def load_config_from_file(config_file: str | os.PathLike[str] | None) -> BaseConfig:
    """Reads a configuration file; None: the user's own. `FileNotFoundError` if there is none."""
    path = os.fspath(config_file) if config_file is not None else present_file() or default_config_file
    if not os.path.isfile(path):
        raise FileNotFoundError(
            2, "there is no such configuration file. Type `accelerate config` to write one, or leave it out", path
        )
    data = read(path)
    kind = SageMakerConfig if str(data.get("compute_environment")) == _SAGEMAKER else ClusterConfig
    return kind.from_dict(data, path)


def read(path: str) -> dict[str, Any]:
    """The content of a file of YAML 1.1 (where `no` is false) or JSON; `ValueError` if it is neither."""
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    text = Path(path).read_text(encoding="utf-8")
    try:
        if path.endswith(".json"):
            data = json.loads(text)
        else:
            yaml = YAML(typ="safe", pure=True)
            yaml.version = (1, 1)
            data = yaml.load(text)
    except (YAMLError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} cannot be read as {'JSON' if path.endswith('.json') else 'YAML'}: {error}") from error
    if not isinstance(data, dict | None):
        raise ValueError(
            f"{path} holds a {type(data).__name__}, and a mapping was expected, such as `num_processes: 2`."
        )
    return data or {}


def write(path: str, content: Mapping[str, Any]) -> None:
    """Writes a file as a whole or not at all. Texts have quotes, so that no version of YAML takes `no` for false."""
    text = json.dumps(content, indent=2, sort_keys=True) + "\n" if path.endswith(".json") else _yaml(content)
    target = Path(path).resolve()
    target.parent.mkdir(parents=True, exist_ok=True)
    new = target.with_name(f".{target.name}.{os.getpid()}")
    new.write_text(text, encoding="utf-8")
    os.replace(new, target)


def _yaml(content: Mapping[str, Any], indent: str = "") -> str:
    """Block style, each scalar and list as in JSON, which YAML contains."""
    lines = []
    for key, value in sorted(content.items()):
        if isinstance(value, Mapping) and value:
            lines.append(f"{indent}{key}:\n{_yaml(value, indent + '  ')}")
        else:
            lines.append(f"{indent}{key}: {json.dumps(value)}\n")
    return "".join(lines)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    return str(value) if isinstance(value, str) else value
