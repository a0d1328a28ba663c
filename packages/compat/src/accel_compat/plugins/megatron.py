"""`MegatronLMPlugin`: the options of Megatron-LM, as `Megatron` of accel-megatron."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from importlib import import_module
from typing import TYPE_CHECKING, Any

from accel_compat.plugins.variables import fill, flag, variable
from accel_core import NotInstalledError
from accel_core.api.component import how_to_install

if TYPE_CHECKING:
    from accel_core import Strategy

_PREFIX = "MEGATRON_LM_"


@dataclass
class MegatronLMPlugin:
    """Options of Megatron-LM. `ours()` refuses those that are no option of a strategy here, by name.

    Two defaults say nothing: sequences are not shared out, and nothing clips but the script.
    """

    tp_degree: int | None = variable(_PREFIX + "TP_DEGREE", int, 1)
    pp_degree: int | None = variable(_PREFIX + "PP_DEGREE", int, 1)
    use_custom_fsdp: bool | None = variable(_PREFIX + "USE_CUSTOM_FSDP", flag, False)
    overlap_cpu_optimizer_d2h_h2d: bool | None = variable(_PREFIX + "OVERLAP_CPU_OPTIMIZER_D2H_H2D", flag, False)
    no_load_optim: bool | None = variable(_PREFIX + "NO_LOAD_OPTIM", flag, False)
    eod_mask_loss: bool | None = variable(_PREFIX + "EOD_MASK_LOSS", flag, False)
    no_save_optim: bool | None = variable(_PREFIX + "NO_SAVE_OPTIM", flag, False)
    optimizer_cpu_offload: bool | None = variable(_PREFIX + "OPTIMIZER_CPU_OFFLOAD", flag, False)
    use_precision_aware_optimizer: bool | None = variable(_PREFIX + "USE_PRECISION_AWARE_OPTIMIZER", flag, False)
    decoder_last_pipeline_num_layers: int | None = variable(_PREFIX + "DECODER_LAST_PIPELINE_NUM_LAYERS", int)
    recompute_granularity: str | None = variable(_PREFIX + "RECOMPUTE_GRANULARITY", str, "full")
    recompute_method: str | None = variable(_PREFIX + "RECOMPUTE_METHOD", str, "uniform")
    recompute_num_layers: int | None = variable(_PREFIX + "RECOMPUTE_NUM_LAYERS", int, 1)
    attention_backend: bool | None = variable(_PREFIX + "ATTENTION_BACKEND", flag, True)
    expert_model_parallel_size: int | None = variable(_PREFIX + "EXPERT_MODEL_PARALLEL_SIZE", int, 1)
    context_parallel_size: int | None = variable(_PREFIX + "CONTEXT_PARALLEL_SIZE", int, 1)
    attention_dropout: float | None = variable(_PREFIX + "ATTENTION_DROPOUT", float, 0.0)
    hidden_dropout: float | None = variable(_PREFIX + "HIDDEN_DROPOUT", float, 0.0)
    attention_softmax_in_fp32: bool | None = variable(_PREFIX + "ATTENTION_SOFTMAX_IN_FP32", flag, True)
    expert_tensor_parallel_size: int | None = variable(_PREFIX + "EXPERT_TENSOR_PARALLEL_SIZE", int, 1)
    calculate_per_token_loss: bool | None = variable(_PREFIX + "CALCULATE_PER_TOKEN_LOSS", flag, True)
    use_rotary_position_embeddings: bool | None = variable(_PREFIX + "USE_ROTARY_POSITION_EMBEDDINGS", flag, True)
    num_micro_batches: int | None = variable(_PREFIX + "NUM_MICRO_BATCHES", int, 1)
    gradient_clipping: float | None = variable(_PREFIX + "GRADIENT_CLIPPING", float)
    sequence_parallelism: bool | None = variable(_PREFIX + "SEQUENCE_PARALLELISM", flag, False)
    recompute_activations: bool | None = variable(_PREFIX + "RECOMPUTE_ACTIVATIONS", flag, False)
    use_distributed_optimizer: bool | None = variable(_PREFIX + "USE_DISTRIBUTED_OPTIMIZER", flag, False)
    pipeline_model_parallel_split_rank: int | None = None
    num_layers_per_virtual_pipeline_stage: int | None = None
    is_train_batch_min: bool = True
    train_iters: int | None = None
    train_samples: int | None = None
    weight_decay_incr_style: str = "constant"
    start_weight_decay: float | None = None
    end_weight_decay: float | None = None
    lr_decay_style: str = "linear"
    lr_decay_iters: int | None = None
    lr_decay_samples: int | None = None
    lr_warmup_iters: int | None = None
    lr_warmup_samples: int | None = None
    lr_warmup_fraction: float | None = None
    min_lr: float = 0
    consumed_samples: list[int] | None = None
    no_wd_decay_cond: Callable[..., Any] | None = None
    scale_lr_cond: Callable[..., Any] | None = None
    lr_mult: float = 1.0
    megatron_dataset_flag: bool = False
    seq_length: int | None = None
    encoder_seq_length: int | None = None
    decoder_seq_length: int | None = None
    tensorboard_dir: str | None = None
    set_all_logging_options: bool = False
    eval_iters: int = 100
    eval_interval: int = 1000
    return_logits: bool = False
    custom_train_step_class: Any = None
    custom_train_step_kwargs: dict[str, Any] | None = None
    custom_model_provider_function: Callable[..., Any] | None = None
    custom_prepare_model_function: Callable[..., Any] | None = None
    custom_megatron_datasets_provider_function: Callable[..., Any] | None = None
    custom_get_batch_function: Callable[..., Any] | None = None
    custom_loss_function: Callable[..., Any] | None = None
    other_megatron_args: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        fill(self)

    def ours(self, world_size: int) -> Strategy:  # noqa: ARG002  # every plugin of a strategy is told
        """The strategy. `ValueError` for options that are none of it, with what to write instead."""
        try:
            package = import_module("accel_megatron")  # an extra
        except ModuleNotFoundError as error:
            raise NotInstalledError(
                f"MegatronLMPlugin: accel-megatron is not installed. {how_to_install('accel-megatron')}"
            ) from error
        made: Strategy = package.MegatronLMPlugin(**{each.name: getattr(self, each.name) for each in fields(self)})
        return made
