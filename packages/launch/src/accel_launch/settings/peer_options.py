"""Replacements for options of other launchers (Accelerate, torchrun, DeepSpeed, mpirun): data for messages.

Options of the same name and meaning are missing: they are options here. Names are spelled with
underscores, without dashes; a star at the end stands for all with that beginning and no own row.
"""

from __future__ import annotations

_WHAT_TO_TYPE = {
    "leave it out: several processes train data-parallel by themselves. --num-processes says how many": (
        "multi_gpu multi_cpu multi_xpu"
    ),
    "leave it out: the type of the devices is found out. --device-ids chooses among them, --cpu does without": (
        "use_xpu use_mps_device"
    ),
    "leave it out: torch itself does this now": "ipex",
    "leave it out: starting pods of TPUs is not done here. Start `accel launch` on each machine": (
        "tpu no_tpu_cluster vm tpu_*"
    ),
    "VARIABLE=value in front of `accel launch`: processes inherit the environment": "env",
    "leave it out: the script itself is started": "main_training_function",
    "--mixed-precision bf16-true": "downcast_bf16",
    "--log-level error, and the summary of a failure stays short by itself": "quiet",
    "leave it out: machines meet at --main-process-ip": "same_network",
    "--numa-binding node": "enable_cpu_affinity",
    "mpirun itself, around `accel launch script.py` or `python script.py`: it joins what MPI has started": "mpirun_*",
    "leave it out: submitting jobs to a cloud service is not done here. Run `accel launch` in the job": (
        "aws_access_key_id aws_secret_access_key"
    ),
    "--dynamo.mode": "dynamo_mode",
    "--dynamo.fullgraph": "dynamo_use_fullgraph",
    "--dynamo.dynamic": "dynamo_use_dynamic",
    "--dynamo.use-regional-compilation": "dynamo_use_regional_compilation",
    "--strategy fsdp with --fsdp.replicate, --fsdp.shard, --fsdp.tensor-parallel and --fsdp.context-parallel": (
        "use_parallelism_config parallelism_config_*"
    ),
    "--strategy fsdp --fsdp.replicate N": "parallelism_config_dp_replicate_size",
    "--strategy fsdp --fsdp.shard N": "parallelism_config_dp_shard_size",
    "--strategy fsdp --fsdp.tensor-parallel N, and a parallelize_plan in the code": (
        "parallelism_config_tp_size use_tp tp_size"
    ),
    "--strategy fsdp --fsdp.context-parallel N": "parallelism_config_cp_size",
    "--strategy fsdp, and what `accel launch --fsdp -h` shows": "use_fsdp",
    "leave it out: there is one version of it, that of torch's fully_shard": "fsdp_version",
    (
        "--fsdp.reshard-after-forward for FULL_SHARD, --fsdp.no-reshard-after-forward for SHARD_GRAD_OP, "
        "--fsdp.replicate N for the hybrid ones, --strategy ddp for NO_SHARD"
    ): ("fsdp_sharding_strategy"),
    "--fsdp.reshard-after-forward": "fsdp_reshard_after_forward",
    "--fsdp.cpu-offload": "fsdp_offload_params",
    "--fsdp.activation-checkpointing": "fsdp_activation_checkpointing",
    "leave it out: what units keep is computed again, and not moved": "fsdp_activation_checkpointing_offload",
    "--fsdp.wrap: class names, a number of parameters, or 'none'": "fsdp_auto_wrap_policy",
    "--fsdp.wrap N": "fsdp_min_num_params",
    "--fsdp.wrap ClassName,OtherClass": "fsdp_transformer_layer_cls_to_wrap",
    "leave it out: checkpoints are written in parts, and load under any strategy": "fsdp_state_dict_type",
    "leave it out: the next unit is gathered ahead by itself": (
        "fsdp_backward_prefetch fsdp_backward_prefetch_policy fsdp_forward_prefetch"
    ),
    "leave it out: parameters keep their names and shapes": "fsdp_use_orig_params",
    "leave it out: ranks take rank 0's parameters": "fsdp_sync_module_states",
    "accelerator.build_model(...) in the code, which loads each process its part": "fsdp_cpu_ram_efficient_loading",
    "--fp8.backend": "fp8_backend",
    "--fp8.enable-fsdp-float8-all-gather": "fp8_enable_fsdp_float8_all_gather",
    "--strategy deepspeed, and what `accel launch --deepspeed -h` shows": (
        "use_deepspeed deepspeed_config_file zero_stage offload_optimizer_device offload_param_device "
        "offload_optimizer_nvme_path offload_param_nvme_path zero3_init_flag zero3_save_16bit_model "
        "deepspeed_moe_layer_cls_names"
    ),
    "accelerator.clip_grad_norm_(...) in the code": "gradient_clipping megatron_lm_gradient_clipping",
    "`accel launch` on each machine, with --num-machines, --machine-rank and --main-process-ip": "deepspeed_hostfile",
    "--device-ids on each machine": "deepspeed_exclusion_filter deepspeed_inclusion_filter",
    "`accel launch` on each machine, or srun or mpirun around it": "deepspeed_multinode_launcher",
    "--strategy megatron, and what `accel launch --megatron -h` shows": "use_megatron_lm megatron_lm_*",
    "--num-processes": "np n",
    "--num-processes, which counts those of all machines together": "nproc_per_node num_gpus gpus",
    "--num-machines, and --min-machines for the least": "nnodes",
    "--machine-rank": "node_rank",
    "--main-process-ip": "master_addr",
    "--main-process-port": "master_port",
    "leave it out: a single machine has a free port of its own": "standalone",
    "--mixed-precision fp8, and what `accel launch --fp8 -h` shows": "fp8_*",
}
"""What to type here → the options of other launchers that it replaces."""

PEER_OPTIONS = {name: hint for hint, names in _WHAT_TO_TYPE.items() for name in names.split()}


def advice(name: str) -> str | None:
    """A sentence that says what to type for an option of another launcher; None if none has it."""
    name = name.lstrip("-").replace("-", "_")
    families = (PEER_OPTIONS[each] for each in PEER_OPTIONS if each.endswith("*") and name.startswith(each[:-1]))
    hint = PEER_OPTIONS.get(name) or next(families, None)
    if hint is None:
        return None
    return f"L{hint[1:]}." if hint.startswith("leave it out") else f"Type {hint}."
