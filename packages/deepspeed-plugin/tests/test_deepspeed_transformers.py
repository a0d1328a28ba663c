"""A Llama of transformers with tied weights and gradient checkpointing trains, generates, and is saved under stage 3."""

from __future__ import annotations

import pytest
import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM
from transformers.utils.logging import disable_progress_bar

from accel_core import Accelerator
from accel_deepspeed import DeepSpeed
from accel_testing import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated")
disable_progress_bar()  # which would have a thread

WORLD, STEPS, WORDS = 2, 2, 32
PROMPT = torch.tensor([[3, 1, 4, 1, 5]])


def llama():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=True,
        attn_implementation="eager",
    )
    model = LlamaForCausalLM(config).train()
    model.gradient_checkpointing_enable()
    return model


def loss_of(model, step, rank):
    ids = torch.randint(WORDS, (2, 6), generator=torch.Generator().manual_seed(10 * step + rank))
    return model(input_ids=ids, labels=ids).loss


def generated(model, length, **options):
    chosen = GenerationConfig(max_new_tokens=length, do_sample=False, eos_token_id=None, pad_token_id=0)
    return model.generate(PROMPT, generation_config=chosen, **options)


def trained(folder):
    accelerator = Accelerator(strategy=DeepSpeed(zero_stage=3), cpu=True)
    model = llama()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    for step in range(STEPS):
        accelerator.backward(loss_of(model, step, accelerator.process_index))
        optimizer.step()
        optimizer.zero_grad()
    found, inner = {}, accelerator.unwrap_model(model.eval())
    with torch.no_grad():
        found["logits"] = model(PROMPT).logits
    found["tokens"] = generated(model, 4)
    found["tokens of the inner model"] = generated(inner, 4)
    found["unlike lengths"] = generated(inner, 3 + accelerator.process_index, synced_gpus=True)
    inner.save_pretrained(
        folder / "method", is_main_process=accelerator.is_main_process, save_function=accelerator.save
    )
    inner.save_pretrained(
        folder / "state", is_main_process=accelerator.is_main_process, state_dict=accelerator.get_state_dict(model)
    )
    accelerator.save_model(model, folder / "weights")
    inner.config.save_pretrained(folder / "weights")
    accelerator.backward(loss_of(model.train(), STEPS, accelerator.process_index))
    optimizer.step()
    accelerator.end_training()
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("llama")


@pytest.fixture(scope="module")
def found(folder):
    return run_ranks(trained, WORLD, folder, timeout=100)


@pytest.fixture(scope="module")
def expected():
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        for rank in range(WORLD):
            (loss_of(model, step, rank) / WORLD).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


@pytest.mark.parametrize("saved", ["method", "state", "weights"])
def test_it_is_loaded_by_its_own_library_as_it_was_trained(found, folder, expected, saved):
    model = LlamaForCausalLM.from_pretrained(folder / saved, attn_implementation="eager").eval()
    assert model.lm_head.weight is model.model.embed_tokens.weight
    with torch.no_grad():
        logits = model(PROMPT).logits
        torch.testing.assert_close(logits, expected(PROMPT).logits)
    for rank in found:
        assert torch.equal(rank["logits"], logits)


def test_all_ranks_generate_what_one_process_does(found, expected):
    tokens = generated(expected, 4)
    for number, rank in enumerate(found):
        assert torch.equal(rank["tokens"], tokens)
        assert torch.equal(rank["tokens of the inner model"], tokens)
        assert torch.equal(rank["unlike lengths"], generated(expected, 3 + number))
