"""The tables of Llama, GPT-2, Qwen 2, Qwen 3 and Mixtral, as this package offers them.

Names of layer norms that stand twice are those of the local layer spec and of Transformer Engine's,
which has them inside of the linear layer behind; so are those of experts.
"""

from __future__ import annotations

from functools import partial

import torch.nn.functional as F

from accel_megatron.conversion.table import ROPE, Combine, Family, FieldRule, Row

_LAYER = "decoder.layers.{layer}"
_THEIR = "model.layers.{layer}"

_SILU: FieldRule = {"silu": {"activation_func": F.silu}}
_FALSE: FieldRule = {False: {}}

_EMBEDDINGS = (
    Row("embedding.word_embeddings.weight", "model.embed_tokens.weight", split=0, padded=True),
    Row("decoder.final_layernorm.weight", "model.norm.weight"),
    Row("output_layer.weight", "lm_head.weight", split=0, padded=True),
)
_ATTENTION = (
    Row(
        (f"{_LAYER}.input_layernorm.weight", f"{_LAYER}.self_attention.linear_qkv.layer_norm_weight"),
        f"{_THEIR}.input_layernorm.weight",
    ),
    Row(
        f"{_LAYER}.self_attention.linear_qkv.weight",
        tuple(f"{_THEIR}.self_attn.{each}_proj.weight" for each in "qkv"),
        combine="qkv",
        split=0,
    ),
    Row(f"{_LAYER}.self_attention.linear_proj.weight", f"{_THEIR}.self_attn.o_proj.weight", split=1),
    Row(
        (f"{_LAYER}.pre_mlp_layernorm.weight", f"{_LAYER}.mlp.linear_fc1.layer_norm_weight"),
        f"{_THEIR}.post_attention_layernorm.weight",
    ),
)
_MLP = (
    Row(
        f"{_LAYER}.mlp.linear_fc1.weight",
        (f"{_THEIR}.mlp.gate_proj.weight", f"{_THEIR}.mlp.up_proj.weight"),
        combine="gate_up",
        split=0,
    ),
    Row(f"{_LAYER}.mlp.linear_fc2.weight", f"{_THEIR}.mlp.down_proj.weight", split=1),
)
_QKV_BIAS = Row(
    f"{_LAYER}.self_attention.linear_qkv.bias",
    tuple(f"{_THEIR}.self_attn.{each}_proj.bias" for each in "qkv"),
    combine="qkv",
    split=0,
)
_QK_NORMS = tuple(
    Row(f"{_LAYER}.self_attention.{each}_layernorm.weight", f"{_THEIR}.self_attn.{each}_norm.weight") for each in "qk"
)

_FIELDS: dict[str, FieldRule] = {
    "attention_dropout": "attention_dropout",
    "hidden_act": _SILU,
    "hidden_size": "hidden_size",
    "initializer_range": "init_method_std",
    "intermediate_size": "ffn_hidden_size",
    "max_position_embeddings": "max_sequence_length",
    "num_attention_heads": "num_attention_heads",
    "num_hidden_layers": "num_layers",
    "num_key_value_heads": "num_query_groups",
    "rms_norm_eps": "layernorm_epsilon",
    "rope_parameters": ROPE,
    "tie_word_embeddings": "share_embeddings_and_output_weights",
    "vocab_size": "vocab_size",
}
_SETTINGS = {
    "add_bias_linear": False,
    "gated_linear_unit": True,
    "hidden_dropout": 0.0,
    "normalization": "RMSNorm",
    "position_embedding_type": "rope",
}
_WINDOWS: dict[str, FieldRule] = {
    "layer_types": {"full_attention": {}},
    "sliding_window": {None: {}},
    "use_sliding_window": _FALSE,
}
_TIED = {"lm_head.weight": "model.embed_tokens.weight"}

LLAMA = Family(
    "llama",
    (*_EMBEDDINGS, *_ATTENTION, *_MLP),
    _FIELDS | {"attention_bias": _FALSE, "head_dim": "kv_channels", "mlp_bias": _FALSE},
    _SETTINGS,
    _TIED,
    unused=frozenset({"pretraining_tp"}),
    ignored=(".rotary_emb.inv_freq",),
)

QWEN2 = Family(
    "qwen2",
    (*_EMBEDDINGS, *_ATTENTION, _QKV_BIAS, *_MLP),
    _FIELDS | _WINDOWS | {"use_mrope": _FALSE},
    _SETTINGS | {"add_qkv_bias": True},
    _TIED,
    unused=frozenset({"max_window_layers"}),
    ignored=(".rotary_emb.inv_freq",),
)

QWEN3 = Family(
    "qwen3",
    (*_EMBEDDINGS, *_ATTENTION, *_QK_NORMS, *_MLP),
    _FIELDS | _WINDOWS | {"attention_bias": _FALSE, "head_dim": "kv_channels"},
    _SETTINGS | {"qk_layernorm": True},
    _TIED,
    unused=frozenset({"max_window_layers"}),
)

MIXTRAL = Family(
    "mixtral",
    (
        *_EMBEDDINGS,
        *_ATTENTION,
        Row(f"{_LAYER}.mlp.router.weight", f"{_THEIR}.block_sparse_moe.gate.weight"),
        Row(
            (
                f"{_LAYER}.mlp.experts.local_experts.{{expert}}.linear_fc1.weight",
                f"{_LAYER}.mlp.experts.linear_fc1.weight{{expert}}",
            ),
            tuple(f"{_THEIR}.block_sparse_moe.experts.{{expert}}.{each}.weight" for each in ("w1", "w3")),
            combine="gate_up",
            split=0,
        ),
        Row(
            (
                f"{_LAYER}.mlp.experts.local_experts.{{expert}}.linear_fc2.weight",
                f"{_LAYER}.mlp.experts.linear_fc2.weight{{expert}}",
            ),
            f"{_THEIR}.block_sparse_moe.experts.{{expert}}.w2.weight",
            split=1,
        ),
    ),
    _FIELDS
    | {
        "head_dim": "kv_channels",
        "num_experts_per_tok": "moe_router_topk",
        "num_local_experts": "num_moe_experts",
        "output_router_logits": _FALSE,  # with True, transformers adds a loss of its own form, for which there is no setting
        "router_jitter_noise": {0.0: {}},
        "sliding_window": {None: {}},
    },
    # Of the experts that it takes, transformers makes the weights add up to one: a softmax of these alone.
    _SETTINGS | {"moe_router_load_balancing_type": "none", "moe_router_pre_softmax": False},
    _TIED,
    unused=frozenset({"router_aux_loss_coef"}),
)


def _gpt2_linear(megatron: str, theirs: str, split: int, combine: Combine = "plain") -> tuple[Row, Row]:
    """A weight of transformers' `Conv1D`, which is (in, out), and its bias."""
    return (
        Row(f"{_LAYER}.{megatron}.weight", f"transformer.h.{{layer}}.{theirs}.weight", combine, split, transposed=True),
        Row(f"{_LAYER}.{megatron}.bias", f"transformer.h.{{layer}}.{theirs}.bias", combine, 0 if split == 0 else None),
    )


def _gpt2_norm(megatron: tuple[str, ...], theirs: str) -> tuple[Row, Row]:
    return Row(tuple(f"{each}weight" for each in megatron), f"{theirs}.weight"), Row(
        tuple(f"{each}bias" for each in megatron), f"{theirs}.bias"
    )


GPT2 = Family(
    "gpt2",
    (
        Row("embedding.word_embeddings.weight", "transformer.wte.weight", split=0, padded=True),
        Row("embedding.position_embeddings.weight", "transformer.wpe.weight"),
        *_gpt2_norm(
            (f"{_LAYER}.input_layernorm.", f"{_LAYER}.self_attention.linear_qkv.layer_norm_"), "transformer.h.{layer}.ln_1"
        ),
        *_gpt2_linear("self_attention.linear_qkv", "attn.c_attn", 0, "qkv"),
        *_gpt2_linear("self_attention.linear_proj", "attn.c_proj", 1),
        *_gpt2_norm((f"{_LAYER}.pre_mlp_layernorm.", f"{_LAYER}.mlp.linear_fc1.layer_norm_"), "transformer.h.{layer}.ln_2"),
        *_gpt2_linear("mlp.linear_fc1", "mlp.c_fc", 0),
        *_gpt2_linear("mlp.linear_fc2", "mlp.c_proj", 1),
        *_gpt2_norm(("decoder.final_layernorm.",), "transformer.ln_f"),
        Row("output_layer.weight", "lm_head.weight", split=0, padded=True),
    ),
    {
        "activation_function": {
            "gelu_new": {"activation_func": partial(F.gelu, approximate="tanh")},
            "gelu_pytorch_tanh": {"activation_func": partial(F.gelu, approximate="tanh")},
            "gelu": {"activation_func": F.gelu},
        },
        "add_cross_attention": _FALSE,
        "attn_pdrop": "attention_dropout",
        "embd_pdrop": "hidden_dropout",
        "initializer_range": "init_method_std",
        "layer_norm_epsilon": "layernorm_epsilon",
        "n_embd": "hidden_size",
        "n_head": "num_attention_heads",
        "n_inner": "ffn_hidden_size",
        "n_layer": "num_layers",
        "n_positions": "max_sequence_length",
        "reorder_and_upcast_attn": _FALSE,
        "resid_pdrop": "hidden_dropout",
        "scale_attn_by_inverse_layer_idx": _FALSE,
        "scale_attn_weights": {True: {}},
        "tie_word_embeddings": "share_embeddings_and_output_weights",
        "vocab_size": "vocab_size",
    },
    {"normalization": "LayerNorm", "position_embedding_type": "learned_absolute"},
    {"lm_head.weight": "transformer.wte.weight"},
    unused=frozenset(
        {
            "summary_activation", "summary_first_dropout", "summary_proj_to_labels", "summary_type", "summary_use_proj",
            "n_ctx", "task_specific_params",
        }
    ),
    prefix="transformer.",
    ignored=(".attn.bias", ".attn.masked_bias"),
)  # fmt: skip
