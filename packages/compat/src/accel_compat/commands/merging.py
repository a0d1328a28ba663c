"""What holds of a command line of `accelerate launch` and a configuration file."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from accel_compat.commands.config_file import (
    BaseConfig,
    ClusterConfig,
    SageMakerConfig,
    load_config_from_file,
    present_file,
)
from accel_compat.commands.options import OPTIONS, given_of

STRATEGIES: Mapping[str, str] = {
    "use_fsdp": "FSDP",
    "use_deepspeed": "DEEPSPEED",
    "use_megatron_lm": "MEGATRON_LM",
    "tpu": "XLA",
}
"""Flag → `distributed_type`."""

_PREFIXES = {
    "fsdp_config": "fsdp_",
    "fp8_config": "fp8_",
    "dynamo_config": "dynamo_",
    "parallelism_config": "parallelism_config_",
    "megatron_lm_config": "megatron_lm_",
    "deepspeed_config": "",
    "mpirun_config": "",
}
_TPU = "TPUs are not started here: start the script by the launcher of torch_xla"
_CLOUD = "jobs of a cloud service are not started here: type `accelerate launch` in the job"
_HOSTS = "type `accelerate launch` on each machine, with --num_machines, --machine_rank and --main_process_ip"
_REFUSED: Mapping[str, str] = {
    "tpu": _TPU,
    "tpu_use_cluster": _TPU,
    "tpu_use_sudo": _TPU,
    "vm": _TPU,
    "env": "variables are inherited: type NAME=value in front of `accelerate launch`",
    "aws_access_key_id": _CLOUD,
    "aws_secret_access_key": _CLOUD,
    "mpirun_hostfile": "type `mpirun --hostfile FILE accelerate launch …`: what MPI has started is joined",
    "deepspeed_hostfile": _HOSTS,
    "deepspeed_exclusion_filter": "choose by --gpu_ids on each machine",
    "deepspeed_inclusion_filter": "choose by --gpu_ids on each machine",
}
_OF_DEEPSPEED = (
    "zero_stage",
    "offload_optimizer_device",
    "offload_param_device",
    "offload_optimizer_nvme_path",
    "offload_param_nvme_path",
    "gradient_accumulation_steps",
    "gradient_clipping",
    "zero3_init_flag",
    "zero3_save_16bit_model",
    "deepspeed_config_file",
    "deepspeed_moe_layer_cls_names",
    "deepspeed_multinode_launcher",
)
_UNDER: Mapping[str, tuple[str, ...]] = {
    "use_fsdp": ("fsdp_",),
    "use_deepspeed": _OF_DEEPSPEED,
    "use_megatron_lm": ("megatron_lm_",),
    "use_parallelism_config": ("parallelism_config_",),
}
_IDLE: Mapping[str, str] = {
    "main_training_function": "a script is run from its first line",
    "downcast_bf16": "it is for TPUs",
    "same_network": "machines meet at main_process_ip",
}


def merge(arguments: argparse.Namespace) -> tuple[argparse.Namespace, BaseConfig | None, bool]:
    """Fills in what the file says and the command line does not, in the namespace itself.

    Returns it, the file's content, and whether the precision is the file's. Raises `ValueError` for
    what cannot be done here; what has no effect here is said on standard error.
    """
    given = {*given_of(arguments)}
    file = _file(arguments)
    if isinstance(file, SageMakerConfig):
        raise ValueError(f"the file says compute_environment: AMAZON_SAGEMAKER, and {_CLOUD}")
    arguments.use_cpu = arguments.cpu
    from_file = False
    if isinstance(file, ClusterConfig):
        if not any(getattr(arguments, flag) for flag in (*STRATEGIES, "multi_gpu")):
            for flag, kind in STRATEGIES.items():
                setattr(arguments, flag, file.distributed_type == kind)
            arguments.use_parallelism_config = bool(file.parallelism_config)
        arguments.use_cpu = arguments.cpu or file.use_cpu or file.distributed_type == "MULTI_CPU"
        for name, value in _said(file):
            if name not in given:
                setattr(arguments, name, value)
        from_file = "mixed_precision" not in given and file.mixed_precision is not None
        if arguments.num_processes == -1:
            raise ValueError("the file leaves num_processes open: add --num_processes N.")
    _check(arguments)
    for line in _idle(arguments, given):
        print(f"accelerate: {line}", file=sys.stderr)  # noqa: T201
    arguments.mixed_precision = arguments.mixed_precision or "no"
    arguments.dynamo_backend = arguments.dynamo_backend or "no"
    arguments.num_machines = arguments.num_machines or 1
    return arguments, file, from_file


def _file(arguments: argparse.Namespace) -> BaseConfig | None:
    """The file that was asked for, or that is there; with --cpu, only the former."""
    if arguments.config_file is None and (arguments.cpu or present_file() is None):
        return None
    return load_config_from_file(arguments.config_file)


def _said(file: ClusterConfig) -> Iterator[tuple[str, Any]]:
    """Options and values that a file gives, under the names of the command line."""
    for key, value in vars(file).items():
        prefix = _PREFIXES.get(key)
        if prefix is not None:
            yield from ((name if name.startswith(prefix) else f"{prefix}{name}", each) for name, each in value.items())
        elif key not in {"compute_environment", "distributed_type", "use_cpu"} and value is not None:
            yield key, value


def _check(arguments: argparse.Namespace) -> None:
    """Raises `ValueError` for what would change the result if it were left out, and cannot be done."""
    for name, reason in _REFUSED.items():
        if getattr(arguments, name, None):
            raise ValueError(f"{name} was given: {reason}.")
    chosen = [f"--{flag}" for flag in STRATEGIES if getattr(arguments, flag)]
    if len(chosen) > 1:
        raise ValueError(f"{' and '.join(chosen)} were both given, and a run has one strategy. Leave one of them out.")
    several = (arguments.num_machines or 1) > 1
    if several and arguments.use_deepspeed and arguments.deepspeed_multinode_launcher not in {None, "standard"}:
        raise ValueError(f"deepspeed_multinode_launcher={arguments.deepspeed_multinode_launcher} was given: {_HOSTS}.")
    if arguments.module and arguments.no_python:
        raise ValueError("--module and --no_python were both given, and a program is one or the other.")
    if arguments.use_parallelism_config and not (arguments.use_fsdp or arguments.use_deepspeed):
        raise ValueError("--use_parallelism_config was given, which needs --use_fsdp --fsdp_version 2.")
    if (
        arguments.gpu_ids not in {None, "all"}
        and not str(arguments.gpu_ids).replace(",", "").replace(" ", "").isdigit()
    ):
        raise ValueError(
            f"gpu_ids={arguments.gpu_ids} was given, and indices are taken, such as 0,1. Set CUDA_VISIBLE_DEVICES for others."
        )


def _idle(arguments: argparse.Namespace, given: set[str]) -> Iterator[str]:
    """A line for each option of the command line that has no effect here, or another one."""
    for name, reason in _IDLE.items():
        if name in given:
            yield f"--{name} has no effect: {reason}."
    for flag, names in _UNDER.items():
        without = [f"--{name}" for name in OPTIONS if name in given and name.startswith(names)]
        if without and not getattr(arguments, flag):
            yield f"{', '.join(without)}: no effect without --{flag}."
    count = arguments.num_processes or 1
    if count > 1 and arguments.use_cpu and not arguments.use_fsdp and (arguments.num_machines or 1) == 1:
        yield f"{count} processes are started, where Accelerate starts one. For one, give --num_processes 1."
