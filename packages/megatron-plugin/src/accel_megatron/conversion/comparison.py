"""Whether a Megatron-core model computes what a configuration of transformers says."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from accel_megatron.conversion.building import TIED, VOCABULARY, configured
from accel_megatron.conversion.pieces import padded_vocabulary

if TYPE_CHECKING:
    from accel_megatron.conversion.settings import Settings

# Fields of TransformerConfig that change logits. Others change training, speed or memory.
_ARCHITECTURE = (
    "activation_func", "activation_func_clamp_value", "add_bias_linear", "add_qkv_bias", "apply_residual_connection_post_layernorm",
    "attention_output_gate", "experimental_attention_variant", "ffn_hidden_size", "gated_linear_unit", "glu_linear_offset", "hidden_size",
    "kv_channels", "layernorm_epsilon", "layernorm_zero_centered_gamma", "moe_apply_probs_on_input", "moe_expert_capacity_factor",
    "moe_ffn_hidden_size", "moe_latent_size", "moe_layer_freq", "moe_router_enable_expert_bias", "moe_router_group_topk",
    "moe_router_num_groups", "moe_router_pre_softmax", "moe_router_score_function", "moe_router_topk",
    "moe_router_topk_scaling_factor", "moe_shared_expert_intermediate_size", "mtp_num_layers", "multi_latent_attention",
    "no_rope_freq", "normalization", "num_attention_heads", "num_layers", "num_moe_experts", "num_query_groups", "qk_l2_norm",
    "qk_layernorm", "rotary_interleaved", "softmax_scale", "softmax_type", "window_attn_skip_freq", "window_size",
)  # fmt: skip
_ROTARY = ("rotary_percent", "rotary_base", "rope_scaling", "rope_scaling_factor", "seq_len_interpolation_factor")


def check_same(settings: Settings, model: Any) -> None:
    """Raises ValueError if a model computes something else than the settings of a configuration."""
    config, arguments = configured(settings)
    pairs = {name: (getattr(model.config, name), getattr(config, name)) for name in _ARCHITECTURE}
    expected = {
        "position_embedding_type": arguments["position_embedding_type"],
        TIED: arguments[TIED],
        VOCABULARY: padded_vocabulary(arguments[VOCABULARY], config.tensor_model_parallel_size),
    }
    if arguments["position_embedding_type"] == "learned_absolute":
        expected["max_sequence_length"] = arguments["max_sequence_length"]
    pairs |= {name: (getattr(model, name), value) for name, value in expected.items()}
    different = [
        f"{name}={found!r} instead of {meant!r}" for name, (found, meant) in pairs.items() if not _same(found, meant)
    ]
    if not different and hasattr(model, "rotary_pos_emb") and not _same_rotation(model, arguments):
        given = {name: arguments[name] for name in _ROTARY if name in arguments}
        different = [f"other frequencies of rotary embeddings than {given}"]
    if different:
        raise ValueError(
            f"to_transformers() was to write a model with its configuration, but the model has {'; '.join(different)}. Pass the "
            f"configuration of this model: to_transformers(model, folder, config=...)."
        )


def _same(found: Any, expected: Any) -> bool:
    if isinstance(found, partial) and isinstance(expected, partial):
        return (found.func, found.args, found.keywords) == (expected.func, expected.args, expected.keywords)
    return bool(found == expected)


def _same_rotation(model: Any, arguments: Settings) -> bool:
    from megatron.core.models.common.embeddings import RotaryEmbedding

    given: dict[str, Any] = {name: arguments[name] for name in _ROTARY if name in arguments}
    made = RotaryEmbedding(model.config.kv_channels, **{"rotary_percent": 1.0, **given}, use_cpu_initialization=True)
    found = model.rotary_pos_emb
    return bool(
        found.seq_len_interpolation_factor == made.seq_len_interpolation_factor
        and torch.allclose(found.inv_freq.cpu(), made.inv_freq.cpu(), rtol=1e-6, atol=0)
    )
