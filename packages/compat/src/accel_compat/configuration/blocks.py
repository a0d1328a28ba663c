"""Rules for the keys of the blocks of Accelerate's files: block → key without its prefix → rule."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from accel_compat.configuration.fsdp import ignored, reshard, sharding, wrap_classes, wrap_least, wrap_policy
from accel_compat.configuration.rules import NOTHING, Carry, Outcome, PeerFile, Rule, carry, leave, only_if, same

_MPI = "start the script as `mpirun --hostfile FILE accel launch script.py`: accel launch joins what MPI has started"
_FP8_TE = (
    "give it in the code, as options of Transformer Engine are: "
    "Accelerator(mixed_precision=FP8(TERecipeKwargs({}=...))), from accel_precision"
)


_PREFETCH = "the next unit is gathered ahead by itself"


class Block(NamedTuple):
    """A block of keys.

    Args:
        rules: key without the block's prefix → rule.
        distributed_type: under which Accelerate reads the block; empty: always.
        left: why any other key of the block is left; empty if Accelerate does not know others.
    """

    rules: Mapping[str, Rule]
    distributed_type: str = ""
    left: str = ""


def backend(_: PeerFile, value: Any) -> Outcome:
    """`dynamo_backend`, which older versions have at the top level."""
    if same(value, "no") or same(value, False):
        return NOTHING
    return Carry({"dynamo_backend": str(value).strip().lower()})


def _size(new: str) -> Rule:
    """A size of a dimension of the processes, which 1 does without."""
    reason = f"under strategy fsdp only. Set strategy: fsdp, and {new} there"
    return only_if(
        lambda peer: peer.is_sharded and not peer.shards_nothing, reason, carry(new, int, nothing=(1,)), nothing=(1,)
    )


_FSDP: Mapping[str, Rule] = {
    "sharding_strategy": sharding,
    "reshard_after_forward": reshard,
    "auto_wrap_policy": wrap_policy,
    "transformer_layer_cls_to_wrap": wrap_classes,
    "min_num_params": wrap_least,
    "offload_params": carry("fsdp.cpu_offload", bool),
    "activation_checkpointing": carry("fsdp.activation_checkpointing", bool),
    "ignored_modules": ignored,
    **{
        key: leave(reason, says_nothing)
        for key, says_nothing, reason in (
            ("version", (2,), "there is one version of it, that of torch's fully_shard"),
            ("activation_checkpointing_offload", (False,), "what units keep is computed again, and not moved"),
            ("backward_prefetch", ("BACKWARD_PRE", "1"), _PREFETCH),
            ("backward_prefetch_policy", ("BACKWARD_PRE", "1"), _PREFETCH),
            ("forward_prefetch", (False,), _PREFETCH),
            ("use_orig_params", (True,), "parameters keep their names and shapes"),
            ("sync_module_states", (True,), "ranks take rank 0's parameters"),
            ("cpu_ram_efficient_loading", (False,), "the script says it: accelerator.build_model(factory)"),
            ("state_dict_type", (), "checkpoints are written in parts, and load under any strategy"),
        )
    },
}

_DYNAMO: Mapping[str, Rule] = {
    "backend": backend,
    **{
        key: only_if(
            lambda peer: peer.compiles,
            "models are not compiled: dynamo_backend is 'no'",
            rule,
            nothing=("default", False),
        )
        for key, rule in {
            "mode": carry("dynamo.mode", str, nothing=("default",)),
            "use_fullgraph": carry("dynamo.fullgraph", bool),
            "use_dynamic": carry("dynamo.dynamic", bool),
            "use_regional_compilation": carry("dynamo.use_regional_compilation", bool),
        }.items()
    },
}

_FP8: Mapping[str, Rule] = {
    key: only_if(
        lambda peer: peer.mixed_precision == "fp8",
        "mixed_precision is not fp8, so Accelerate does not read it either",
        rule,
    )
    for key, rule in {
        "backend": only_if(
            lambda peer: str(peer.block("fp8_config").get("backend")).upper() != "MSAMP",
            "MS-AMP is no longer maintained. Set fp8.backend: torchao, or transformer_engine",
            carry(
                "fp8.backend",
                Literal["torchao", "transformer_engine"],
                names={"AO": "torchao", "TORCHAO": "torchao", "TE": "transformer_engine"},
            ),
        ),
        "enable_fsdp_float8_all_gather": only_if(
            lambda peer: peer.is_sharded and not peer.shards_nothing,
            "nothing is gathered: the strategy is not fsdp",
            carry("fp8.enable_fsdp_float8_all_gather", bool),
            nothing=(False,),
        ),
        "pad_inner_dim": leave(
            "give it in the code: Accelerator(mixed_precision=FP8(AORecipeKwargs(config=Float8LinearConfig(pad_inner_dim=True)))), "
            "from accel_precision and torchao.float8",
            nothing=(False,),
        ),
        "interval": leave("Transformer Engine computes scales at every step", nothing=(1,)),
        **{
            key: leave(_FP8_TE.format("fp8_format" if key == "format" else key), nothing)
            for key, nothing in {
                "use_autocast_during_eval": (False,),
                "margin": (0,),
                "format": ("HYBRID",),
                "amax_history_len": (1024,),
                "amax_compute_algo": ("most_recent",),
                "override_linear_precision": ([False, False, False], "(False, False, False)"),
            }.items()
        },
        "opt_level": leave("it is an option of MS-AMP, which is no longer maintained"),
        "optimization_level": leave("it is an option of MS-AMP, which is no longer maintained"),
        "amax_history_length": leave("Accelerate does not read it either; " + _FP8_TE.format("amax_history_len")),
        "amax_compute_algorithm": leave("Accelerate does not read it either; " + _FP8_TE.format("amax_compute_algo")),
    }.items()
}

_PARALLELISM: Mapping[str, Rule] = {
    "dp_replicate_size": _size("fsdp.replicate"),
    "dp_shard_size": _size("fsdp.shard"),
    "tp_size": leave(
        "how layers are cut depends on the model. Give both in the code: FSDP(tensor_parallel=n, parallelize_plan={...})",
        nothing=(1,),
    ),
    "cp_size": _size("fsdp.context_parallel"),
    "cp_backend": leave("there is one way to share a sequence: fsdp.context_parallel", nothing=("torch",)),
    "cp_comm_strategy": leave(
        "how parts of a sequence travel is decided by fsdp.context_parallel", nothing=("allgather",)
    ),
    "sp_size": leave("sequences are shared by fsdp.context_parallel: set it instead", nothing=(1,)),
    "sp_backend": leave("sequences are shared by fsdp.context_parallel", nothing=("deepspeed",)),
    "sp_seq_length": leave("sequences are shared by fsdp.context_parallel, which needs no length"),
    "sp_seq_length_is_variable": leave("sequences are shared by fsdp.context_parallel, of any length", nothing=(True,)),
    "sp_attn_implementation": leave("under fsdp.context_parallel, attention is F.scaled_dot_product_attention"),
}

_OF_DEEPSPEED = "the other options are those that `accel launch --deepspeed -h` shows"
_HOSTS = "type accel launch on each machine, or start it with srun or mpirun, which it joins"
_DEEPSPEED: Mapping[str, Rule] = {
    "gradient_accumulation_steps": only_if(
        lambda peer: not same(peer.block("deepspeed_config").get("gradient_accumulation_steps"), "auto"),
        "the script says it: Accelerator(gradient_accumulation_steps=n)",
        carry("gradient_accumulation_steps", int),
    ),
    "gradient_clipping": leave(
        "the script clips: accelerator.clip_grad_norm_(model.parameters(), 1.0)", nothing=("auto", "none")
    ),
    **dict.fromkeys(
        (
            "deepspeed_hostfile",
            "deepspeed_exclusion_filter",
            "deepspeed_inclusion_filter",
            "deepspeed_multinode_launcher",
        ),
        leave(_HOSTS, nothing=("standard",)),
    ),
    "zero_stage": carry("deepspeed.zero_stage", int),
    "offload_optimizer_device": carry("deepspeed.offload_optimizer", str, nothing=("none",)),
    "offload_param_device": carry("deepspeed.offload_param", str, nothing=("none",)),
    "offload_optimizer_nvme_path": carry("deepspeed.offload_folder", str, nothing=("none",)),
    "offload_param_nvme_path": leave("deepspeed.offload_folder serves both", nothing=("none",)),
    "zero3_init_flag": leave("the script says it: accelerator.build_model(factory)", nothing=(False,)),
    "zero3_save_16bit_model": leave("weights are always gathered for saving", nothing=(True,)),
    "deepspeed_moe_layer_cls_names": leave("give it in the code: DeepSpeed(moe_leaf_modules=[...])", nothing=(None,)),
}

_OF_MEGATRON = "the model, the loop or the optimizer says it: MegatronLMPlugin of accel_megatron tells where, for each"
_MEGATRON: Mapping[str, Rule] = {
    "tp_degree": carry("megatron.tensor_parallel", int, nothing=(1,)),
    "pp_degree": carry("megatron.pipeline_parallel", int, nothing=(1,)),
    "expert_model_parallel_size": carry("megatron.expert_parallel", int, nothing=(1,)),
    "sequence_parallelism": carry("megatron.sequence_parallel", bool, nothing=(False,)),
    "use_distributed_optimizer": carry("megatron.distributed_optimizer", bool, nothing=(False,)),
    "num_micro_batches": leave(
        "the script gives a window's micro-batches: accelerator.forward_backward(model, micro_batches, loss_fn)",
        nothing=(1,),
    ),
    "gradient_clipping": leave(
        "the script clips: accelerator.clip_grad_norm_(model.parameters(), 1.0)", nothing=("none",)
    ),
}

BLOCKS: Mapping[str, Block] = MappingProxyType(
    {
        "fsdp_config": Block(_FSDP, "FSDP"),
        "parallelism_config": Block(_PARALLELISM),
        "deepspeed_config": Block(_DEEPSPEED, "DEEPSPEED", _OF_DEEPSPEED),
        "megatron_lm_config": Block(_MEGATRON, "MEGATRON_LM", _OF_MEGATRON),
        "fp8_config": Block(_FP8),
        "dynamo_config": Block(_DYNAMO),
        "mpirun_config": Block({"mpirun_hostfile": leave(_MPI), "mpirun_ccl": leave(_MPI, nothing=("0",))}),
    }
)
"""Blocks by name."""
