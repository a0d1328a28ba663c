"""The keys of a DeepSpeed configuration: their types, and those refused beside a user's own loop.

DeepSpeed reads keys of its top level, and of several sections, without looking for others: a
misspelt one is ignored in silence. A test compares these tables with the installed DeepSpeed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, Literal

from accel_core.api.component import nearest

Kind = Literal["bool", "number", "text", "any"]
"""What a key holds. "any": DeepSpeed checks the value by itself, or takes several types."""


def _section(names: str, kind: Kind = "any", **sections: Any) -> Mapping[str, Any]:
    return MappingProxyType({**dict.fromkeys(names.split(), kind), **sections})


_ZERO = _section(
    "stage contiguous_gradients reduce_scatter reduce_bucket_size use_multi_rank_bucket_allreduce allgather_partitions "
    "allgather_bucket_size overlap_comm compute_grad_norm load_from_fp32_weights elastic_checkpoint sub_group_size "
    "prefetch_bucket_size param_persistence_threshold model_persistence_threshold max_live_parameters max_reuse_distance "
    "gather_16bit_weights_on_model_save module_granularity_threshold use_all_reduce_for_fetch_params allgather_sequential "
    "stage3_prefetch_bucket_size stage3_param_persistence_threshold stage3_model_persistence_threshold "
    "stage3_max_live_parameters stage3_max_reuse_distance stage3_gather_16bit_weights_on_model_save "
    "stage3_module_granularity_threshold stage3_use_all_reduce_for_fetch_params stage3_allgather_sequential "
    "stage3_gather_fp16_weights_on_model_save ignore_unused_parameters legacy_stage1 round_robin_gradients "
    "parameter_alignment zero_hpz_partition_size zero_quantized_weights zero_quantized_nontrainable_weights "
    "zero_quantized_gradients memory_efficient_linear pipeline_loading_checkpoint override_module_apply "
    "log_trace_cache_warnings enable_sanity_checks save_muon_momentum_buffer_in_memory",
    offload_param=_section("device nvme_path buffer_count buffer_size max_in_cpu pin_memory"),
    offload_optimizer=_section(
        "device nvme_path buffer_count pin_memory pipeline_read pipeline_write fast_init ratio super_offload cpuadam_cores_perc"
    ),
    leaf_module=_section("classes names name_suffixes"),
)

_BF16 = _section(
    "enabled immediate_grad_update check_grad_overflow bf16_master_weights_and_grads bf16_optimizer_states"
)

KEYS: Mapping[str, Any] = MappingProxyType(
    {
        **_section("train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps", "number"),
        **_section("gradient_clipping gradient_predivide_factor steps_per_print vocabulary_size", "number"),
        **_section("prescale_gradients disable_allgather dump_state disable_python_gc memory_breakdown", "bool"),
        **_section("zero_allow_untested_optimizer zero_force_ds_cpu_optimizer", "bool"),
        **_section("use_data_before_expert_parallelism", "bool"),
        **_section("communication_data_type seq_parallel_communication_data_type log_level", "text"),
        "zero_optimization": _ZERO,
        "optimizer": _section("type", "text", params="any", legacy_fusion="bool"),
        "scheduler": _section("type", "text", params="any"),
        "bf16": _BF16,
        "bfloat16": _BF16,
        "fp16": _section(
            "enabled auto_cast loss_scale initial_scale_power loss_scale_window hysteresis consecutive_hysteresis "
            "min_loss_scale fp16_master_weights_and_grads"
        ),
        "torch_autocast": _section("enabled", "bool", dtype="text", lower_precision_safe_modules="any"),
        "data_types": _section("grad_accum_dtype param_dtype buffer_dtype", "text", keep_in_fp32_modules="any"),
        "activation_checkpointing": MappingProxyType(
            {
                **_section("partition_activations contiguous_memory_optimization cpu_checkpointing", "bool"),
                **_section("synchronize_checkpoint_boundary profile", "bool"),
                "number_checkpoints": "number",
            }
        ),
        "aio": MappingProxyType(
            {
                **_section("block_size queue_depth intra_op_parallelism", "number"),
                **_section("single_submit overlap_events use_gds", "bool"),
            }
        ),
        "comms_logger": _section("enabled prof_all prof_ops verbose debug"),
        "timers": _section("", throughput=_section("enabled synchronized")),
        "gradient_allreduce_op": "text",
        "managed_gradient_accumulation": "bool",
    }
)
"""What may be written, section by section. A section is a mapping, anything else the kind of a value."""

_MONITOR = "Write Accelerator(log_with={0!r}), and accelerator.log(values, step)"
_PROFILE = "Write `with accelerator.profile():` around some steps"
_REMOVED = "DeepSpeed has removed what it stands for; take it out"
_CHECKPOINT = "accelerator.save_state() writes checkpoints, in a format that every strategy reads; take it out"
_OF_THE_LOADER = "Data belongs to the loader that you prepare, under every strategy; take it out"

REFUSED: Mapping[str, str] = MappingProxyType(
    {
        "amp": "Write Accelerator(mixed_precision='bf16')",
        "autotuning": "It starts the script many times over; tune with DeepSpeed's own command, and write here what it finds",
        "checkpoint": _CHECKPOINT,
        "comet": _MONITOR.format("comet_ml"),
        "compile": "Write Accelerator(dynamo_backend='inductor'), which compiles the model",
        "compression_training": _REMOVED,
        "csv_monitor": _MONITOR.format("jsonl"),
        "curriculum_learning": _OF_THE_LOADER,
        "data_efficiency": _OF_THE_LOADER,
        "data_parallel_size": "As many processes as were started share the data; take it out",
        "dataloader_drop_last": "Write torch.utils.data.DataLoader(..., drop_last=True)",
        "datastates_ckpt": _CHECKPOINT,
        "eigenvalue": _REMOVED,
        "elasticity": "A run goes on with any number of processes by accelerator.load_state(); take it out",
        "expert_parallel": "Experts are not shared out here; take it out, and name their modules in moe_leaf_modules",
        "flops_profiler": _PROFILE,
        "graph_harvesting": _REMOVED,
        "hybrid_engine": "It is for models that generate between steps of training; take it out",
        "nebula": _CHECKPOINT,
        "pipeline": "A pipeline calls the model by itself, which this strategy leaves to your loop; take it out",
        "progressive_layer_drop": _REMOVED,
        "quantize_training": _REMOVED,
        "sequence_parallel_size": "Sequences are shared out by Accelerator(strategy=FSDP(context_parallel=n))",
        "sparse_attention": _REMOVED,
        "sparse_gradients": _REMOVED,
        "tensor_parallel": "Layers are shared out by Accelerator(strategy=FSDP(tensor_parallel=n))",
        "tensorboard": _MONITOR.format("tensorboard"),
        "wall_clock_breakdown": _PROFILE,
        "wandb": _MONITOR.format("wandb"),
        "weight_quantization": "It is for inference; take it out",
        "zero_optimization.cpu_offload": 'Write "offload_optimizer": {"device": "cpu"}',
        "zero_optimization.cpu_offload_param": 'Write "offload_param": {"device": "cpu"}',
        "zero_optimization.cpu_offload_use_pin_memory": 'Write "pin_memory": true in the section of what is offloaded',
        "zero_optimization.mics_hierarchical_params_gather": _REMOVED,
        "zero_optimization.mics_shard_size": _REMOVED,
        "zero_optimization.zenflow": "It updates parameters between the steps of your optimizer; take it out",
        "zero_optimization.zeropp_loco_param": _REMOVED,
    }
)
"""What has no place here, and what to do instead. A section or switch that says it is off is left out in silence."""

ONLY: Mapping[str, tuple[object, str]] = MappingProxyType(
    {
        "gradient_allreduce_op": ("mean", "Gradients are means over the processes here; multiply the loss for a sum"),
        "managed_gradient_accumulation": (
            True,
            "`with accelerator.accumulate(model):` says when a window closes; take it out",
        ),
    }
)
"""Keys of which one value has a place here, and what to do instead of others."""

_TYPES: Mapping[str, tuple[tuple[type, ...], str]] = MappingProxyType(
    {"bool": ((bool,), "true or false"), "number": ((int, float), "a number"), "text": ((str,), "a text")}
)


def check_keys(config: Mapping[str, Any], source: str) -> None:
    """Raises for an unknown or refused key, and for a value that DeepSpeed would misread.

    Raises:
        TypeError: a value is of another type than the key holds.
        ValueError: anything else; the message has the nearest name, or what to do instead.
    """
    _check(config, KEYS, (), source)


def autos(config: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[str]:
    """The dotted names of the keys that hold "auto"."""
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from autos(value, (*path, name))
        elif value == "auto":
            yield ".".join((*path, name))


def is_off(value: object) -> bool:
    """Whether a switch is false or null, or a section has `"enabled": false`, or nothing at all."""
    return not value.get("enabled", bool(value)) if isinstance(value, Mapping) else not value


def without_refused(config: Mapping[str, Any], path: tuple[str, ...] = ()) -> dict[str, Any]:
    """A copy of checked keys, without refused ones, which are off, and without nulls."""
    return {
        name: without_refused(value, (*path, name)) if isinstance(value, Mapping) else value
        for name, value in config.items()
        if value is not None and ".".join((*path, name)) not in REFUSED
    }


def _check(config: Mapping[str, Any], known: Mapping[str, Any], path: tuple[str, ...], source: str) -> None:
    for name, value in config.items():
        dotted = ".".join((*path, str(name)))
        if dotted in REFUSED:
            if not is_off(value):
                raise ValueError(f"{source} has {dotted!r}, which has no place here. {REFUSED[dotted]}.")
        elif dotted in ONLY and value != ONLY[dotted][0]:
            raise ValueError(f"{source} has {dotted!r} with {value!r}, which has no place here. {ONLY[dotted][1]}.")
        elif name not in known:
            raise ValueError(_unknown(dotted, name, known, path, source))
        elif value is not None and isinstance(known[name], Mapping):
            _check_section(dotted, value, source)
            _check(value, known[name], (*path, name), source)
        elif value is not None:
            _check_value(dotted, value, known[name], source)


def _check_section(dotted: str, value: object, source: str) -> None:
    if isinstance(value, Mapping):
        return
    example = ': write {"stage": 1}, for instance' if dotted == "zero_optimization" else ""
    raise TypeError(f"{source} has {dotted!r} with {value!r}, where a section of keys is expected{example}.")


def _check_value(dotted: str, value: object, kind: str, source: str) -> None:
    types, words = _TYPES.get(kind, ((), ""))
    if value == "auto" or not types:
        return
    if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
        raise TypeError(
            f"{source} has {dotted!r} with {value!r}, a {type(value).__name__}, and DeepSpeed would not look at its type. "
            f"Write {words}."
        )


def _unknown(dotted: str, name: object, known: Mapping[str, Any], path: tuple[str, ...], source: str) -> str:
    place = f"the section {'.'.join(path)!r}" if path else "DeepSpeed's configuration"
    meant = nearest(str(name), tuple(known))
    advice = f"Did you mean {meant!r}?" if meant else f"Known are {', '.join(sorted(known))}."
    return f"{source} has {dotted!r}, but {place} has no key {str(name)!r}. {advice}"
