"""Adapters beside a frozen base are trained, saved and gone on with: by layers of the test's own, and by peft where it is installed."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from accel_core import Accelerator
from accel_deepspeed import DeepSpeed
from accel_testing import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")

WORLD, STEPS, WORDS, RANK = 2, 2, 32, 2
KINDS = [
    "own",
    pytest.param("peft", marks=pytest.mark.skipif(not find_spec("peft"), reason="peft is not installed")),
]


class Adapted(nn.Module):
    """A frozen linear layer, and a product of two thin matrices that is added to it. See arXiv:2106.09685."""

    def __init__(self, base):
        super().__init__()
        self.base = base
        self.lora_A = nn.Parameter(torch.randn(RANK, base.in_features) / RANK)
        self.lora_B = nn.Parameter(torch.zeros(base.out_features, RANK))

    def forward(self, x):
        return self.base(x) + x @ self.lora_A.T @ self.lora_B.T


def llama():
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 1}
    return LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, num_hidden_layers=2, tie_word_embeddings=True, **sizes))


def adapted(kind, seed):
    base = llama()
    torch.manual_seed(seed)
    if kind == "peft":
        from peft import LoraConfig, get_peft_model

        return get_peft_model(base, LoraConfig(r=RANK, lora_alpha=RANK, target_modules=["q_proj", "v_proj"]))
    base.requires_grad_(False)
    for layer in base.model.layers:
        layer.self_attn.q_proj = Adapted(layer.self_attn.q_proj)
        layer.self_attn.v_proj = Adapted(layer.self_attn.v_proj)
    return base


def trained_of(model):
    return [each for each in model.parameters() if each.requires_grad]


def loss_of(model, step, rank):
    ids = torch.randint(WORDS, (2, 6), generator=torch.Generator().manual_seed(10 * step + rank))
    return model(input_ids=ids, labels=ids).loss


class Run:
    def __init__(self, stage, kind, seed):
        self.accelerator = Accelerator(strategy=DeepSpeed(zero_stage=stage), cpu=True)
        model = adapted(kind, seed)
        optimizer = torch.optim.AdamW(trained_of(model), lr=0.1)
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)

    def step(self, number):
        self.accelerator.backward(loss_of(self.model, number, self.accelerator.process_index))
        self.accelerator.clip_grad_norm_(self.model.parameters(), 0.5)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def weights(self):
        return {name: each.clone() for name, each in self.accelerator.get_state_dict(self.model).items()}


def trained(folder, kind):
    found = {}
    for stage in (2, 3):
        run = Run(stage, kind, seed=1)
        for number in range(STEPS):
            run.step(number)
        run.accelerator.save_state(folder / f"{kind} {stage}")
        weights = run.weights()
        if kind == "peft":
            run.accelerator.unwrap_model(run.model).save_pretrained(folder / f"adapters {stage}")
        run.step(STEPS)
        after = run.weights()
        run.accelerator.free_memory()
        other = Run(stage, kind, seed=2)
        other.accelerator.load_state(folder / f"{kind} {stage}")
        other.step(STEPS)
        found[stage] = weights, after, other.weights()
        other.accelerator.free_memory()
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("lora")


@pytest.fixture(scope="module", params=KINDS)
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def found(folder, kind):
    return run_ranks(trained, WORLD, folder, kind, timeout=100)[0]


@pytest.fixture(scope="module")
def expected(kind):
    model = adapted(kind, seed=1)
    optimizer = torch.optim.AdamW(trained_of(model), lr=0.1)
    for step in range(STEPS):
        for rank in range(WORLD):
            (loss_of(model, step, rank) / WORLD).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return model


@pytest.mark.parametrize("stage", [2, 3])
def test_adapters_are_trained_as_by_one_process(found, expected, stage):
    state = expected.state_dict()
    assert found[stage][0].keys() == state.keys()
    for name, value in state.items():
        torch.testing.assert_close(found[stage][0][name], value, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("stage", [2, 3])
def test_a_run_goes_on_from_what_was_saved(found, stage):
    saved, after, again = found[stage]
    assert any(not torch.equal(saved[name], after[name]) for name in saved)
    for name, value in after.items():
        assert torch.equal(again[name], value), name


@pytest.mark.parametrize("stage", [2, 3])
def test_peft_loads_the_adapters_that_it_has_saved(found, folder, kind, expected, stage):
    if kind == "own":
        pytest.skip("of peft alone")
    from peft import PeftModel

    assert not list((folder / f"adapters {stage}").glob("model*"))
    model = PeftModel.from_pretrained(llama(), folder / f"adapters {stage}")
    torch.testing.assert_close(loss_of(model, 9, 0), loss_of(expected, 9, 0), atol=1e-4, rtol=1e-4)
