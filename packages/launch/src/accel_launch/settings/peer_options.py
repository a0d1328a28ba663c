"""The replacements for options of other launchers: data for messages. Nothing else depends on it.

Options of the same name and meaning are missing: they are options here. Keys are spelled with
underscores, without the dashes.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

_BY_WORLD = "leave it out: several processes train data-parallel by themselves. --num-processes says how many"
_DEVICES = "leave it out: the type of the devices is found out. --device-ids chooses among them, --cpu does without"
_FSDP = "--strategy fsdp, and what `accel launch --fsdp -h` shows"
_DEEPSPEED = "--strategy deepspeed, and what `accel launch --deepspeed -h` shows"
_MEGATRON = "--strategy megatron_lm, and what `accel launch --megatron-lm -h` shows"
_MESH = "--strategy fsdp with --fsdp.replicate, --fsdp.shard, --fsdp.tensor-parallel and --fsdp.context-parallel"
_TPU = "leave it out: starting pods of TPUs is not done here. Start `accel launch` on each machine"
_SAGEMAKER = "leave it out: submitting jobs to a cloud service is not done here. Run `accel launch` in the job"
_FP8 = "--mixed-precision fp8, and what `accel launch --fp8 -h` shows"
_MPI = "mpirun itself, around `accel launch script.py` or `python script.py`: it joins what MPI has started"

PEER_OPTIONS: Mapping[str, str] = MappingProxyType(
    {
        # Accelerate
        "multi_gpu": _BY_WORLD,
        "multi_cpu": _BY_WORLD,
        "multi_xpu": _BY_WORLD,
        "use_xpu": _DEVICES,
        "ipex": "leave it out: torch itself does this now",
        "tpu": _TPU,
        "tpu_cluster": _TPU,
        "no_tpu_cluster": _TPU,
        "tpu_use_cluster": _TPU,
        "tpu_use_sudo": _TPU,
        "vm": _TPU,
        "env": "VARIABLE=value in front of `accel launch`: processes inherit the environment",
        "main_training_function": "leave it out: the script itself is started",
        "downcast_bf16": "--mixed-precision bf16-true",
        "quiet": "--log-level error, and the summary of a failure stays short by itself",
        "same_network": "leave it out: machines meet at --main-process-ip",
        "use_mps_device": _DEVICES,
        "enable_cpu_affinity": "--numa-binding node",
        "mpirun_hostfile": _MPI,
        "mpirun_ccl": _MPI,
        "aws_access_key_id": _SAGEMAKER,
        "aws_secret_access_key": _SAGEMAKER,
        "dynamo_mode": "--dynamo.mode",
        "dynamo_use_fullgraph": "--dynamo.fullgraph",
        "dynamo_use_dynamic": "--dynamo.dynamic",
        "dynamo_use_regional_compilation": "--dynamo.use-regional-compilation",
        "use_parallelism_config": _MESH,
        "parallelism_config_dp_replicate_size": "--strategy fsdp --fsdp.replicate N",
        "parallelism_config_dp_shard_size": "--strategy fsdp --fsdp.shard N",
        "parallelism_config_tp_size": "--strategy fsdp --fsdp.tensor-parallel N, and a parallelize_plan in the code",
        "parallelism_config_cp_size": "--strategy fsdp --fsdp.context-parallel N",
        "use_tp": "--strategy fsdp --fsdp.tensor-parallel N, and a parallelize_plan in the code",
        "tp_size": "--strategy fsdp --fsdp.tensor-parallel N, and a parallelize_plan in the code",
        "use_fsdp": _FSDP,
        "fsdp_version": "leave it out: there is one version of it, that of torch's fully_shard",
        "fsdp_sharding_strategy": (
            "--fsdp.reshard-after-forward for FULL_SHARD, --fsdp.no-reshard-after-forward for SHARD_GRAD_OP, --fsdp.replicate N for the "
            "hybrid ones, --strategy ddp for NO_SHARD"
        ),
        "fsdp_reshard_after_forward": "--fsdp.reshard-after-forward",
        "fsdp_offload_params": "--fsdp.cpu-offload",
        "fsdp_activation_checkpointing": "--fsdp.activation-checkpointing",
        "fsdp_activation_checkpointing_offload": "leave it out: what units keep is computed again, and not moved",
        "fsdp_auto_wrap_policy": "--fsdp.wrap: class names, a number of parameters, or 'none'",
        "fsdp_min_num_params": "--fsdp.wrap N",
        "fsdp_transformer_layer_cls_to_wrap": "--fsdp.wrap ClassName,OtherClass",
        "fsdp_state_dict_type": "leave it out: checkpoints are written in parts, and load under any strategy",
        "fsdp_backward_prefetch": "leave it out: the next unit is gathered ahead by itself",
        "fsdp_backward_prefetch_policy": "leave it out: the next unit is gathered ahead by itself",
        "fsdp_forward_prefetch": "leave it out: the next unit is gathered ahead by itself",
        "fsdp_use_orig_params": "leave it out: parameters keep their names and shapes",
        "fsdp_sync_module_states": "leave it out: ranks take rank 0's parameters",
        "fsdp_cpu_ram_efficient_loading": "accelerator.build_model(...) in the code, which loads each process its part",
        "fp8_backend": "--fp8.backend",
        "fp8_enable_fsdp_float8_all_gather": "--fp8.enable-fsdp-float8-all-gather",
        "use_deepspeed": _DEEPSPEED,
        "deepspeed_config_file": _DEEPSPEED,
        "zero_stage": _DEEPSPEED,
        "offload_optimizer_device": _DEEPSPEED,
        "offload_param_device": _DEEPSPEED,
        "offload_optimizer_nvme_path": _DEEPSPEED,
        "offload_param_nvme_path": _DEEPSPEED,
        "gradient_clipping": "accelerator.clip_grad_norm_(...) in the code",
        "zero3_init_flag": _DEEPSPEED,
        "zero3_save_16bit_model": _DEEPSPEED,
        "deepspeed_hostfile": "`accel launch` on each machine, with --num-machines, --machine-rank and --main-process-ip",
        "deepspeed_exclusion_filter": "--device-ids on each machine",
        "deepspeed_inclusion_filter": "--device-ids on each machine",
        "deepspeed_multinode_launcher": "`accel launch` on each machine, or srun or mpirun around it",
        "deepspeed_moe_layer_cls_names": _DEEPSPEED,
        "use_megatron_lm": _MEGATRON,
        "megatron_lm_gradient_clipping": "accelerator.clip_grad_norm_(...) in the code",
        # torchrun and mpirun
        "np": "--num-processes",
        "n": "--num-processes",
        "nproc_per_node": "--num-processes, which counts those of all machines together",
        "nnodes": "--num-machines, and --min-machines for the least",
        "node_rank": "--machine-rank",
        "master_addr": "--main-process-ip",
        "master_port": "--main-process-port",
        "standalone": "leave it out: a single machine has a free port of its own",
        "start_method": "leave it out: processes are started anew",
        "run_path": "leave it out: a script is started as it is",
        "virtual_local_rank": "leave it out: each process sees its local rank",
        "duplicate_stdout_filters": "--tee",
        "duplicate_stderr_filters": "--tee",
        "logs_specs": "--log-dir, --redirects and --tee",
        "event_log_handler": "leave it out: it is not passed on",
        "signals_to_handle": "leave it out: SIGINT, SIGTERM and SIGHUP are passed on",
    }
)
"""Option of another launcher → what to type here."""

PEER_FAMILIES: Mapping[str, str] = MappingProxyType(
    {"megatron_lm_": _MEGATRON, "parallelism_config_": _MESH, "fp8_": _FP8, "mpirun_": _MPI, "tpu_": _TPU}
)
"""The same for options that begin so, and are not named above."""


def advice(name: str) -> str | None:
    """A sentence that says what to type for an option of another launcher; None if none has it."""
    name = name.lstrip("-").replace("-", "_")
    family = next((hint for start, hint in PEER_FAMILIES.items() if name.startswith(start)), None)
    hint = PEER_OPTIONS.get(name, family)
    if hint is None:
        return None
    return f"L{hint[1:]}." if hint.startswith("leave it out") else f"Type {hint}."
