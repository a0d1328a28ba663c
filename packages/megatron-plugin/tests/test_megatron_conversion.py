"""Weights of transformers in Megatron-core models and back: logits are equal, and so is every bit of the weights."""

from __future__ import annotations

import json
from pathlib import Path

import conversion_models
import pytest
import torch
from conversion_models import TOKENS, VOCABULARY, Sizes, convert

from accel_testing import run_ranks

FAMILIES = ["llama", "llama_tied", "gpt2", "qwen2", "qwen3", "mixtral"]


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    conversion_models.load_transformers()
    root = tmp_path_factory.mktemp("transformers")
    return {name: conversion_models.make(name, root) for name in conversion_models.CONFIGS}


@pytest.fixture(scope="session")
def expected(folders):
    """By name, logits of transformers."""
    found = {}
    with torch.no_grad():
        for name, folder in folders.items():
            found[name] = conversion_models.load(folder)(TOKENS).logits
    return found


def check(folders, expected, tmp_path, cases, world_size, function=convert):
    """Converts each (name, sizes), and compares logits, losses and what was written with transformers."""
    tasks = [(folders[name], tmp_path / f"{number}", sizes) for number, (name, sizes) in enumerate(cases)]
    ranks = run_ranks(function, world_size, tasks, timeout=110)
    for number, (name, sizes) in enumerate(cases):
        found = [results[number] for results in ranks]
        logits = expected[name]
        if sizes.virtual is None:
            parts = [each for each in found if each.logits is not None][: sizes.tensor]
            together = torch.cat([each.logits for each in parts], -1)
            assert together.shape[-1] == found[0].vocabulary == -(-VOCABULARY // sizes.tensor) * sizes.tensor
            torch.testing.assert_close(together[..., :VOCABULARY], logits, rtol=1e-5, atol=1e-5)
            assert bool((together[..., VOCABULARY:] < -1e30).all())
            losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2), TOKENS, reduction="none")
            torch.testing.assert_close(parts[-1].losses, losses, rtol=1e-5, atol=1e-5)
        assert all(each.read_again for each in found), name
        padding = (found[0].vocabulary - VOCABULARY) * logits.shape[-1] * 16  # bytes of rows, of embedding and head
        assert all(each.bytes_held - padding <= each.bytes_read <= each.bytes_held for each in found), name
        check_written(folders[name], tmp_path / f"{number}", logits)


class NormLinear:
    """Makes the layer of Transformer Engine that has a norm inside, of Megatron-core's own."""

    def __new__(cls, input_size, output_size, *, config, **options):
        from megatron.core.tensor_parallel import ColumnParallelLinear

        class Linear(ColumnParallelLinear):
            def forward(self, hidden):
                weight, epsilon = self.layer_norm_weight, config.layernorm_epsilon
                return super().forward(torch.nn.functional.rms_norm(hidden, weight.shape, weight, epsilon))

        made = Linear(input_size, output_size, config=config, **options)
        made.layer_norm_weight = torch.nn.Parameter(torch.ones(input_size))
        return made


def convert_with_norms_inside(tasks):
    """Converts with a layer spec whose parameters have the names of Transformer Engine's layers."""
    conversion_models.megatron_cpu.use_cpu()
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.identity_op import IdentityOp

    layer = get_gpt_layer_local_spec(normalization="RMSNorm")
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = IdentityOp
    layer.submodules.self_attention.submodules.linear_qkv = NormLinear
    layer.submodules.mlp.submodules.linear_fc1 = NormLinear
    return convert(tasks, layer_spec=layer)


@pytest.mark.full(group="megatron")
def test_parameters_may_have_the_names_of_layers_with_norms_inside(folders, expected, tmp_path):
    check(folders, expected, tmp_path, [("llama", Sizes())], 1, convert_with_norms_inside)


def check_written(source: Path, target: Path, logits):
    """The folder that was written is the one that was read: for transformers, and for who reads its files."""
    old, new = conversion_models.load(source), conversion_models.load(target)
    assert old.state_dict().keys() == new.state_dict().keys()
    assert all(torch.equal(value, new.state_dict()[name]) for name, value in old.state_dict().items())
    with torch.no_grad():
        assert torch.equal(new(TOKENS).logits, logits)
    maps = [json.loads((each / "model.safetensors.index.json").read_text())["weight_map"] for each in (source, target)]
    assert maps[0].keys() == maps[1].keys()
    configs = [json.loads((each / "config.json").read_text()) for each in (source, target)]
    assert configs[0] == configs[1]


def test_every_family_computes_the_same_alone(folders, expected, tmp_path):
    check(folders, expected, tmp_path, [(name, Sizes()) for name in FAMILIES], 1)


def test_every_family_computes_the_same_in_two_tensor_parallel_ranks(folders, expected, tmp_path):
    cases = [(name, Sizes(tensor=2)) for name in FAMILIES]
    check(folders, expected, tmp_path, cases, 2)


def test_pipelines_and_ranks_of_experts_compute_the_same(folders, expected, tmp_path):
    cases = [(name, Sizes(pipeline=2)) for name in FAMILIES] + [("mixtral", Sizes(experts=2))]
    check(folders, expected, tmp_path, cases, 2)


def test_tensor_parallel_ranks_in_a_pipeline_compute_the_same(folders, expected, tmp_path):
    cases = [(name, Sizes(tensor=2, pipeline=2)) for name in ("llama_tied", "gpt2", "mixtral")]
    check(folders, expected, tmp_path, cases, 4)


@pytest.mark.full(group="megatron")
def test_every_family_computes_the_same_in_every_mesh_of_four_ranks(folders, expected, tmp_path):
    cases = [(name, Sizes(tensor=2, pipeline=2)) for name in ("llama", "qwen2", "qwen3")]
    cases += [(name, Sizes(pipeline=4)) for name in ("llama_tied", "gpt2")]
    cases += [("mixtral", Sizes(experts=4)), ("mixtral", Sizes(pipeline=2, experts=2))]
    check(folders, expected, tmp_path, cases, 4)


@pytest.mark.full(group="megatron")
def test_more_tensor_parallel_ranks_than_query_groups_share_keys_and_values(folders, expected, tmp_path):
    cases = [(name, Sizes(tensor=4)) for name in FAMILIES]
    check(folders, expected, tmp_path, cases, 4)


@pytest.mark.full(group="megatron")
def test_chunks_of_a_virtual_pipeline_are_read_and_written(folders, expected, tmp_path):
    cases = [(name, Sizes(pipeline=2, virtual=2)) for name in ("llama_tied", "gpt2", "mixtral")]
    check(folders, expected, tmp_path, cases, 2)
