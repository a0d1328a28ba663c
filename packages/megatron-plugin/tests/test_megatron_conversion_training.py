"""A model of transformers that is trained under Megatron becomes what transformers itself would have trained."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import conversion_models
import pytest
import torch
from conversion_models import TOKENS

from accel_testing import run_ranks

LEARNING_RATE = 0.05


@pytest.fixture(scope="module", autouse=True)
def transformers_loaded():
    conversion_models.load_transformers()


def train(cases):
    """On each rank: one step of each model, in an arrangement of its own."""
    from accel_core import Accelerator
    from accel_megatron import Megatron, from_transformers, to_transformers

    conversion_models.megatron_cpu.use_cpu()
    losses = []
    for folder, target, mesh in cases:
        accelerator = Accelerator(strategy=Megatron(**mesh), cpu=True)
        factory = partial(from_transformers, folder, attention_dropout=0.0, hidden_dropout=0.0)
        model = accelerator.build_model(factory)
        optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
        model, optimizer = accelerator.prepare(model, optimizer)
        losses.append(float(accelerator.forward_backward(model, list(TOKENS.split(2)), loss_fn, inputs=inputs)))
        optimizer.step()
        to_transformers(model, target)
        accelerator.end_training()
    return losses


def inputs(tokens):
    return (tokens, torch.arange(tokens.shape[1]).expand_as(tokens), None), {"labels": tokens}


def loss_fn(losses, _):
    return losses.sum(), torch.tensor(float(losses.numel()))


def reference(folder: Path):
    """What transformers trains by itself: the model, and its loss before."""
    model = conversion_models.load(folder)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    loss = torch.nn.functional.cross_entropy(model(TOKENS).logits.transpose(1, 2), TOKENS)
    loss.backward()
    optimizer.step()
    return model.state_dict(), loss.item()


TENSOR, PIPELINE = {"tensor_parallel": 2}, {"pipeline_parallel": 2}


def check(tmp_path, world_size, cases):
    names = sorted({name for name, _ in cases})
    folders = {name: conversion_models.make(name, tmp_path) for name in names}
    tasks = [(folders[name], tmp_path / f"{number}", mesh) for number, (name, mesh) in enumerate(cases)]
    ranks = run_ranks(train, world_size, tasks, timeout=100)
    expected = {name: reference(folders[name]) for name in names}
    for number, (name, _) in enumerate(cases):
        weights, loss = expected[name]
        assert all(losses[number] == pytest.approx(loss, rel=1e-5) for losses in ranks)
        trained = conversion_models.load(tmp_path / f"{number}").state_dict()
        for key, value in weights.items():
            torch.testing.assert_close(
                trained[key], value, rtol=1e-5, atol=1e-5, msg=lambda text, key=key: f"{key}: {text}"
            )


def test_a_step_in_two_processes_is_that_of_transformers(tmp_path):
    check(tmp_path, 2, [("llama", TENSOR), ("gpt2", PIPELINE), ("llama_tied", PIPELINE | {"virtual_pipeline": 2})])


@pytest.mark.full(group="megatron")
def test_a_step_in_four_processes_is_that_of_transformers(tmp_path):
    both = TENSOR | PIPELINE
    check(
        tmp_path, 4, [("llama_tied", both), ("gpt2", both), ("qwen2", both | {"virtual_pipeline": 2}), ("qwen3", both)]
    )
