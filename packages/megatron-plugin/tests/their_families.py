"""Tables as a third party publishes them: Phi-3, whose tensors are fused, and GraniteMoE, whose experts are stacked too."""

from __future__ import annotations

import dataclasses

from accel_megatron import Row, find_family

LLAMA = find_family("llama")
MIXTRAL = find_family("mixtral")
LAYER, THEIRS = "decoder.layers.{layer}", "model.layers.{layer}"


def changed(rows, **replacements):
    """The rows, with those for some parameters of a layer, named by their ends, replaced."""
    kept = [row for row in rows if not any(row.megatron_names[0].endswith(f"{end}.weight") for end in replacements)]
    return (*kept, *replacements.values())


PHI3 = dataclasses.replace(
    LLAMA,
    model_type="phi3",
    rows=changed(
        LLAMA.rows,
        linear_qkv=Row(f"{LAYER}.self_attention.linear_qkv.weight", f"{THEIRS}.self_attn.qkv_proj.weight", "qkv", 0),
        linear_fc1=Row(f"{LAYER}.mlp.linear_fc1.weight", f"{THEIRS}.mlp.gate_up_proj.weight", "gate_up", 0),
    ),
    fields={
        **LLAMA.fields,
        "embd_pdrop": "hidden_dropout",
        "resid_pdrop": "hidden_dropout",
        "sliding_window": {None: {}},
    },
    settings={key: value for key, value in LLAMA.settings.items() if key != "hidden_dropout"},
    unused=frozenset({"original_max_position_embeddings"}),
)

EXPERT, MOE = f"{LAYER}.mlp.experts.local_experts.{{expert}}", f"{THEIRS}.block_sparse_moe"
GRANITE_MOE = dataclasses.replace(
    MIXTRAL,
    model_type="granitemoe",
    rows=changed(
        MIXTRAL.rows,
        router=Row(f"{LAYER}.mlp.router.weight", f"{MOE}.router.layer.weight"),
        linear_fc1=Row(f"{EXPERT}.linear_fc1.weight", f"{MOE}.input_linear.weight", "gate_up", 0),
        linear_fc2=Row(f"{EXPERT}.linear_fc2.weight", f"{MOE}.output_linear.weight", split=1),
    ),
    fields={
        **MIXTRAL.fields,
        "attention_bias": {False: {}},
        "attention_multiplier": "softmax_scale",
        "embedding_multiplier": {1.0: {}},
        "logits_scaling": {1.0: {}},
        "residual_multiplier": {1.0: {}},
    },
    unused=frozenset({"router_aux_loss_coef"}),
)

NO_FAMILY = "not a table"
