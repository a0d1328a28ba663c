"""`MegatronLMPlugin`: the options of `Megatron` under their older names.

What stands for an option of `Megatron` is translated. What the model, the loop, the optimizer or
the loader says here is an error that says where to write it.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from accel_megatron.strategy import Megatron

NAME = "MegatronLMPlugin"

_CONFIG = (
    "It is a setting of the model: give it to its TransformerConfig, in the factory of accelerator.build_model(factory)"
)
_RECOMPUTE = (
    "The model decides what its backward computes again: TransformerConfig(recompute_granularity=..., recompute_method=..., "
    "recompute_num_layers=...), in the factory of accelerator.build_model(factory)"
)
_LENGTH = "Lengths are those of the batches, and a model's own its max_sequence_length; leave it out"
_SCHEDULE = "The script has a scheduler of its own: prepare any of torch.optim.lr_scheduler"
_OPTIMIZER = (
    "The script has an optimizer of its own: give torch.optim.AdamW groups of parameters with their lr and weight_decay"
)
_LOOP = "The script has a loop of its own, which decides how long it trains, evaluates and logs; leave it out"
_WINDOW = "Write accelerator.forward_backward(model, micro_batches, loss_fn, inputs), whose functions say it"
_WEIGHTS = "save_state and load_state keep all of a run. For weights alone write accelerator.save_model(model, folder)"
_OFFLOAD = "The distributed optimizer is kept on the device, in float32; leave it out"

REFUSED: Mapping[str, tuple[object, str]] = MappingProxyType(
    {
        "use_custom_fsdp": (False, "Parameters are shared out by strategy='fsdp'"),
        "overlap_cpu_optimizer_d2h_h2d": (False, _OFFLOAD),
        "no_load_optim": (False, _WEIGHTS),
        "eod_mask_loss": (
            False,
            "loss_fn(output, batch) weighs tokens: give those behind the end of a document no weight",
        ),
        "no_save_optim": (False, _WEIGHTS),
        "optimizer_cpu_offload": (False, _OFFLOAD),
        "use_precision_aware_optimizer": (False, _OFFLOAD),
        "decoder_last_pipeline_num_layers": (None, _CONFIG + ", as num_layers_in_last_pipeline_stage"),
        "recompute_granularity": ("full", _RECOMPUTE),
        "recompute_method": ("uniform", _RECOMPUTE),
        "recompute_num_layers": (1, _RECOMPUTE),
        "attention_backend": (True, _CONFIG),
        "attention_dropout": (0.0, _CONFIG),
        "hidden_dropout": (0.0, _CONFIG),
        "attention_softmax_in_fp32": (True, _CONFIG),
        "expert_tensor_parallel_size": (1, "Experts are shared out by expert_model_parallel_size alone; leave it out"),
        "calculate_per_token_loss": (
            True,
            "accelerator.forward_backward weighs tokens by what loss_fn(output, batch) returns; leave it out",
        ),
        "use_rotary_position_embeddings": (True, "Give the GPTModel its position_embedding_type, in the factory"),
        "num_micro_batches": (
            1,
            "Give accelerator.forward_backward(model, micro_batches, loss_fn) so many micro-batches",
        ),
        "gradient_clipping": (
            0,
            "The loop clips: call accelerator.clip_grad_norm_(model.parameters(), max_norm), and leave it out, or write 0",
        ),
        "recompute_activations": (False, _RECOMPUTE),
        "pipeline_model_parallel_split_rank": (None, "Encoders and decoders are not split here; leave it out"),
        "num_layers_per_virtual_pipeline_stage": (
            None,
            "Write strategy=Megatron(virtual_pipeline=n), with n the model's layers / pp_degree / that number",
        ),
        "train_iters": (None, _LOOP),
        "train_samples": (None, _LOOP),
        "weight_decay_incr_style": ("constant", _OPTIMIZER),
        "start_weight_decay": (None, _OPTIMIZER),
        "end_weight_decay": (None, _OPTIMIZER),
        "lr_decay_style": ("linear", _SCHEDULE),
        "lr_decay_iters": (None, _SCHEDULE),
        "lr_decay_samples": (None, _SCHEDULE),
        "lr_warmup_iters": (None, _SCHEDULE),
        "lr_warmup_samples": (None, _SCHEDULE),
        "lr_warmup_fraction": (None, _SCHEDULE),
        "min_lr": (0, _SCHEDULE),
        "consumed_samples": (
            None,
            "accelerator.load_state goes on behind the samples that a run has seen; leave it out",
        ),
        "no_wd_decay_cond": (None, _OPTIMIZER),
        "scale_lr_cond": (None, _OPTIMIZER),
        "lr_mult": (1.0, _OPTIMIZER),
        "megatron_dataset_flag": (False, "Data come from the script's own DataLoader, which accelerator.prepare takes"),
        "seq_length": (None, _LENGTH),
        "encoder_seq_length": (None, _LENGTH),
        "decoder_seq_length": (None, _LENGTH),
        "tensorboard_dir": (None, "Write Accelerator(log_with='tensorboard', project_dir=folder)"),
        "set_all_logging_options": (False, _LOOP),
        "eval_iters": (100, _LOOP),
        "eval_interval": (1000, _LOOP),
        "return_logits": (False, _WINDOW),
        "custom_train_step_class": (None, _WINDOW),
        "custom_train_step_kwargs": (None, _WINDOW),
        "custom_model_provider_function": (None, "Write model = accelerator.build_model(factory)"),
        "custom_prepare_model_function": (None, "Write model = accelerator.build_model(factory)"),
        "custom_megatron_datasets_provider_function": (None, "Data come from the script's own DataLoader"),
        "custom_get_batch_function": (None, _WINDOW),
        "custom_loss_function": (None, _WINDOW),
        "other_megatron_args": (None, _CONFIG + "; what concerns processes are arguments of Megatron(...)"),
    }
)
"""Options that have no place in the strategy: the value that says nothing, and what to write."""


class _Configures(type):
    """Makes every `Megatron` an instance of its older name."""

    def __instancecheck__(cls, instance: object) -> bool:
        from accel_megatron.strategy import Megatron

        return isinstance(instance, Megatron)


class MegatronLMPlugin(metaclass=_Configures):
    """A `Megatron` by older names: `Accelerator(megatron_lm_plugin=MegatronLMPlugin(...))`.

    The result is a `Megatron` like any other, and `isinstance(strategy, MegatronLMPlugin)` is true
    of every `Megatron`. Nothing is read from the environment: the object is complete. None stands
    for "not given" everywhere.

    Args:
        tp_degree: `tensor_parallel` of `Megatron`.
        pp_degree: `pipeline_parallel` of `Megatron`.
        sequence_parallelism: `sequence_parallel` of `Megatron`.
        use_distributed_optimizer: `distributed_optimizer` of `Megatron`.
        context_parallel_size: `context_parallel` of `Megatron`.
        expert_model_parallel_size: `expert_parallel` of `Megatron`.
        is_train_batch_min: without effect: every rank reads its own batches.
        others: the other older options; `REFUSED` has them all. The value there that says nothing
            is accepted.

    Raises:
        TypeError: for a name that is none of the older options.
        ValueError: for an option that has no place here, with what to write instead; for what
            `Megatron` refuses.
    """

    def __new__(  # type: ignore[misc]  # the object is a Megatron, so that nothing else has to know the older names
        cls,
        tp_degree: int | None = None,
        pp_degree: int | None = None,
        *,
        sequence_parallelism: bool | None = None,
        use_distributed_optimizer: bool | None = None,
        context_parallel_size: int | None = None,
        expert_model_parallel_size: int | None = None,
        is_train_batch_min: bool = True,  # noqa: ARG004  # either way nothing follows from it
        **others: Any,
    ) -> Megatron:
        """Translates what is given, and gives the `Megatron`."""
        from accel_megatron.strategy import Megatron

        _refuse(others)
        given: dict[str, Any] = {
            "tensor_parallel": tp_degree,
            "pipeline_parallel": pp_degree,
            "sequence_parallel": sequence_parallelism,
            "context_parallel": context_parallel_size,
            "expert_parallel": expert_model_parallel_size,
            "distributed_optimizer": use_distributed_optimizer,
        }
        return Megatron(**{name: value for name, value in given.items() if value is not None})


def _refuse(given: Mapping[str, Any]) -> None:
    unknown = sorted(given.keys() - REFUSED.keys())
    if unknown:
        raise TypeError(
            f"{NAME} has no options {', '.join(unknown)}. Write strategy=Megatron(...), which lists its own."
        )
    for name, value in given.items():
        nothing, reason = REFUSED[name]
        if value is not None and value != nothing:
            raise ValueError(f"{NAME}({name}={value!r}) was given, which is no option of a strategy here. {reason}.")
