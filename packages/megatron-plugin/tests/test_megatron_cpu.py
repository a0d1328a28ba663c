"""Megatron-core itself, on a CPU: a tiny GPT runs forward and backward."""

from __future__ import annotations

import megatron_cpu
import torch

from accel_core import World
from accel_testing import run_ranks


def train_a_tiny_gpt():
    megatron_cpu.use_cpu()
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig

    world = World.current()
    world.subgroup(range(world.size))
    parallel_state.initialize_model_parallel(1, 1)
    model_parallel_cuda_manual_seed(1)
    config = TransformerConfig(num_layers=2, hidden_size=16, num_attention_heads=4, use_cpu_initialization=True)
    model = GPTModel(config, get_gpt_layer_local_spec(), vocab_size=32, max_sequence_length=8)
    tokens = torch.randint(32, (2, 8))
    loss = model(tokens, torch.arange(8).expand(2, 8), None, labels=tokens).mean()
    loss.backward()
    parallel_state.destroy_model_parallel()
    return loss.item(), {name: each.grad is not None for name, each in model.named_parameters()}


def test_a_gpt_of_megatron_runs_forward_and_backward_on_a_cpu():
    [(loss, found)] = run_ranks(train_a_tiny_gpt, 1)
    assert 2 < loss < 5
    assert len(found) > 20
    assert all(found.values())
