"""A model of transformers, half of which stays in its files, gives the logits of one in memory to the last bit."""

from __future__ import annotations

import pytest
import torch

from accel_big_model import compute_module_sizes, init_empty_weights, load_checkpoint_and_dispatch

transformers = pytest.importorskip("transformers", reason="a model of transformers is what this is about")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_llama_with_tied_weights(dtype, tmp_path):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=100,
        tie_word_embeddings=True,
        max_position_embeddings=64,
    )
    model = transformers.LlamaForCausalLM(config).to(dtype).eval()
    model.save_pretrained(tmp_path, max_shard_size="50KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 5
    ids = torch.randint(0, 100, (2, 9))
    asked = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    expected, generated = model(ids).logits, model.generate(ids, **asked)
    with init_empty_weights():
        other = transformers.LlamaForCausalLM(config).to(dtype).eval()
    half = compute_module_sizes(other)[""] // 2
    other = load_checkpoint_and_dispatch(
        other,
        tmp_path,
        device_map="auto",
        max_memory={"cpu": half},
        no_split_module_classes=["LlamaDecoderLayer"],
    )
    assert set(other.hf_device_map.values()) == {"cpu", "disk"}
    with torch.no_grad():
        assert torch.equal(other(ids).logits, expected)
        assert torch.equal(other.generate(ids, **asked), generated)
