"""The options of `accelerate launch`, as data, and a parser that takes them."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple


class Option(NamedTuple):
    """One option: what it takes (bool: nothing), its default, the words that it may be, its help."""

    kind: Callable[[str], Any] = str
    default: Any = None
    words: tuple[str, ...] = ()
    help: str = ""


def truth(text: str) -> bool:
    """Reads yes and no in the usual spellings; else raises `ValueError`."""
    word = text.strip().lower()
    if word not in {"1", "true", "t", "yes", "y", "on", "0", "false", "f", "no", "n", "off"}:
        raise ValueError(f"{text!r} is neither true nor false")
    return word in {"1", "true", "t", "yes", "y", "on"}


def _three(text: str) -> tuple[bool, ...]:
    return tuple(map(truth, text.split(",")))


FLAG = Option(bool, False)
_TEXT, _COUNT, _YES, _NO = Option(), Option(int), Option(default="true"), Option(default="false")

GROUPS: Mapping[str, Mapping[str, Option]] = MappingProxyType(
    {
        "where to run": {
            "config_file": Option(help="the configuration file, instead of the one in the cache of Hugging Face"),
            "cpu": Option(bool, False, help="train on the CPU"),
            "multi_gpu": Option(bool, False, help="of no effect: several processes train together by themselves"),
            "tpu": Option(bool, False, help="refused: TPUs are started by the launcher of torch_xla"),
            "gpu_ids": Option(help="the accelerators that take part: 'all', or indices between commas"),
            "num_processes": Option(int, help="or --num-processes, as any option: processes of all machines"),
            "num_machines": Option(int, help="machines that take part"),
            "machine_rank": Option(int, help="which of the machines this is, from 0"),
            "main_process_ip": Option(help="address of machine 0"),
            "main_process_port": Option(int, help="port at which the machines meet on machine 0"),
            "same_network": Option(bool, False, help="of no effect: machines meet at main_process_ip"),
            "num_cpu_threads_per_process": Option(int, help="threads that a process computes with on the CPU"),
            "enable_cpu_affinity": Option(bool, False, help="bind each process to the cores near its accelerator"),
        },
        "what to start": {
            "module": Option(bool, False, help="a module, as with `python -m`"),
            "no_python": Option(bool, False, help="any program, not a script of Python"),
            "quiet": Option(bool, False, help="do not raise where the script fails: only its exit status tells"),
            "debug": Option(bool, False, help="compare every collective across the processes before it runs"),
            "main_training_function": Option(help="of no effect: a script is run from its first line"),
            "env": Option(help="refused: set variables in front of `accelerate launch`"),
        },
        "restarts and output": {
            "max_restarts": Option(int, 0, help="how often all processes are started again after a failure"),
            "monitor_interval": Option(float, 0.1, help="in seconds, how often processes are looked after"),
            "rdzv_backend": Option(default="static", help="how machines meet: by their ranks, or c10d"),
            "rdzv_conf": Option(default="", help="options of torch's rendezvous: name=value between commas"),
            "tee": Option(default="0", help="whose output goes to the console and to files of log_dir, as in torchrun"),
            "log_dir": Option(help="folder for the output of each process"),
            "role": Option(default="default", help="the name of the processes in their output"),
        },
        "precision and compilation": {
            "mixed_precision": Option(words=("no", "fp16", "bf16", "fp8"), help="the precision of the computation"),
            "downcast_bf16": Option(bool, False, help="of no effect: it is for TPUs"),
            "dynamo_backend": Option(str.lower, help="the backend of torch.compile"),
            "dynamo_mode": Option(
                default="default",
                words=("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"),
                help="the mode of torch.compile",
            ),
            "dynamo_use_fullgraph": FLAG,
            "dynamo_use_dynamic": FLAG,
            "dynamo_use_regional_compilation": FLAG,
            "fp8_backend": Option(words=("ao", "te", "msamp")),
            "fp8_use_autocast_during_eval": FLAG,
            "fp8_margin": Option(int, 0),
            "fp8_interval": Option(int, 1),
            "fp8_format": Option(default="HYBRID", words=("HYBRID", "E4M3", "E5M2")),
            "fp8_amax_history_len": Option(int, 1024),
            "fp8_amax_compute_algo": Option(default="most_recent", words=("max", "most_recent")),
            "fp8_override_linear_precision": Option(_three, (False, False, False)),
            "fp8_opt_level": Option(default="O2", words=("O1", "O2")),
            "fp8_enable_fsdp_float8_all_gather": Option(truth, True),
            "fp8_pad_inner_dim": Option(truth, True),
        },
        "FSDP": {
            "use_fsdp": Option(bool, False, help="shard the model; the options below say how"),
            "fsdp_version": Option(default="1", words=("1", "2")),
            "fsdp_offload_params": _NO,
            "fsdp_min_num_params": Option(int, 100_000_000),
            "fsdp_sharding_strategy": Option(default="FULL_SHARD"),
            "fsdp_reshard_after_forward": _YES,
            "fsdp_auto_wrap_policy": _TEXT,
            "fsdp_transformer_layer_cls_to_wrap": _TEXT,
            "fsdp_backward_prefetch": _TEXT,
            "fsdp_state_dict_type": _TEXT,
            "fsdp_forward_prefetch": _NO,
            "fsdp_use_orig_params": _YES,
            "fsdp_cpu_ram_efficient_loading": _YES,
            "fsdp_sync_module_states": _YES,
            "fsdp_activation_checkpointing": _NO,
            "fsdp_activation_checkpointing_offload": _NO,
            "fsdp_ignored_modules": _TEXT,
        },
        "parallelism": {
            "use_parallelism_config": Option(bool, False, help="several ways to share a model; needs --use_fsdp"),
            "parallelism_config_dp_replicate_size": Option(int, 1),
            "parallelism_config_dp_shard_size": Option(int, 1),
            "parallelism_config_tp_size": Option(int, 1),
            "parallelism_config_cp_size": Option(int, 1),
            "parallelism_config_cp_backend": Option(default="torch", words=("torch",)),
            "parallelism_config_cp_comm_strategy": Option(default="allgather"),
            "parallelism_config_sp_size": Option(int, 1),
            "parallelism_config_sp_backend": Option(default="deepspeed", words=("deepspeed",)),
            "parallelism_config_sp_seq_length": _TEXT,
            "parallelism_config_sp_seq_length_is_variable": Option(truth, True),
            "parallelism_config_sp_attn_implementation": Option(default="sdpa"),
        },
        "DeepSpeed": {
            "use_deepspeed": Option(bool, False, help="train with DeepSpeed; the options below say how"),
            "deepspeed_config_file": _TEXT,
            "zero_stage": _COUNT,
            "offload_optimizer_device": _TEXT,
            "offload_param_device": _TEXT,
            "offload_optimizer_nvme_path": _TEXT,
            "offload_param_nvme_path": _TEXT,
            "gradient_accumulation_steps": _COUNT,
            "gradient_clipping": Option(float),
            "zero3_init_flag": _TEXT,
            "zero3_save_16bit_model": _TEXT,
            "deepspeed_hostfile": _TEXT,
            "deepspeed_exclusion_filter": _TEXT,
            "deepspeed_inclusion_filter": _TEXT,
            "deepspeed_multinode_launcher": _TEXT,
            "deepspeed_moe_layer_cls_names": _TEXT,
        },
        "Megatron-LM": {
            "use_megatron_lm": Option(bool, False, help="train with Megatron-LM; the options below say how"),
            "megatron_lm_tp_degree": Option(int, 1),
            "megatron_lm_pp_degree": Option(int, 1),
            "megatron_lm_gradient_clipping": Option(float),
            **{
                f"megatron_lm_{name}": Option(truth, False)
                for name in [
                    "use_custom_fsdp",
                    "no_load_optim",
                    "eod_mask_loss",
                    "overlap_cpu_optimizer_d2h_h2d",
                    "no_save_optim",
                    "optimizer_cpu_offload",
                    "use_precision_aware_optimizer",
                ]
            },
            **{
                f"megatron_lm_{name}": _COUNT
                for name in [
                    "decoder_last_pipeline_num_layers",
                    "num_micro_batches",
                    "recompute_num_layers",
                    "expert_model_parallel_size",
                    "context_parallel_size",
                    "expert_tensor_parallel_size",
                ]
            },
            **{
                f"megatron_lm_{name}": _TEXT
                for name in [
                    "sequence_parallelism",
                    "recompute_activations",
                    "use_distributed_optimizer",
                    "recompute_granularity",
                    "recompute_method",
                    "attention_backend",
                    "attention_softmax_in_fp32",
                    "calculate_per_token_loss",
                    "use_rotary_position_embeddings",
                ]
            },
            "megatron_lm_attention_dropout": Option(float),
            "megatron_lm_hidden_dropout": Option(float),
        },
        "refused": {
            "mpirun_hostfile": Option(help="type mpirun around `accelerate launch`, which joins what MPI has started"),
            "tpu_use_sudo": FLAG,
            "vm": _TEXT,
            "aws_access_key_id": _TEXT,
            "aws_secret_access_key": _TEXT,
        },
    }
)
"""Heading → option → what it is. What an option without a help is for, its name says."""

OPTIONS: Mapping[str, Option] = MappingProxyType(
    {name: each for group in GROUPS.values() for name, each in group.items()}
)


class _Given(argparse.Action):
    """Takes a value, and notes in `namespace.nondefault` that it was given."""

    def __call__(
        self, _: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, __: str | None = None
    ) -> None:
        setattr(namespace, self.dest, self.const if self.nargs == 0 else values)
        namespace.nondefault = {*getattr(namespace, "nondefault", ()), self.dest}


class Parser(argparse.ArgumentParser):
    """A parser to which `--num-processes` is `--num_processes`."""

    def _parse_optional(self, arg_string: str) -> Any:
        name, equals, value = arg_string.partition("=")
        if name.startswith("--") and "-" in name[2:]:
            arg_string = f"--{name[2:].replace('-', '_')}{equals}{value}"
        return super()._parse_optional(arg_string)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds every option of the launcher to a parser."""
    for heading, options in GROUPS.items():
        group = parser.add_argument_group(heading)
        for name, option in options.items():
            about: dict[str, Any] = {"dest": name, "default": option.default, "help": option.help or None}
            flags = [f"--{name}", *(["-m"] if name == "module" else [])]
            if option.kind is bool:
                group.add_argument(*flags, action=_Given, nargs=0, const=True, **about)
            else:
                kind: dict[str, Any] = {} if option.kind is str else {"type": option.kind}
                group.add_argument(*flags, action=_Given, choices=option.words or None, **kind, **about)
    tpu = parser.add_argument_group("TPU")
    tpu.add_argument("--tpu_cluster", action="store_true", dest="tpu_use_cluster", help="refused, as --tpu is")
    tpu.add_argument("--no_tpu_cluster", action="store_false", dest="tpu_use_cluster", help="of no effect")


def launch_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """A parser for the options of `accelerate launch`, the script, and its arguments.

    With `subparsers`, it is the parser of a subcommand.
    """
    about = "Start a script in as many processes as asked for; `accel launch -h` shows what it is done by."
    # No abbreviations: an option of the script would be taken for one of ours.
    if subparsers is None:
        parser: argparse.ArgumentParser = Parser("accelerate launch", description=about, allow_abbrev=False)
    else:
        parser = subparsers.add_parser("launch", description=about, help=about, allow_abbrev=False)
    add_options(parser)
    parser.add_argument("training_script", help="the script, or module, or program")
    parser.add_argument("training_script_args", nargs=argparse.REMAINDER, help="what it is given")
    parser.set_defaults(nondefault=set())
    return parser


def given_of(arguments: argparse.Namespace) -> Sequence[str]:
    """The options that were given, by name; of a namespace of somebody else's, those that are not defaults."""
    noted = getattr(arguments, "nondefault", None)
    if noted is not None:
        return [name for name in OPTIONS if name in noted]
    return [name for name, option in OPTIONS.items() if getattr(arguments, name, option.default) != option.default]
