"""A run that goes on under another arrangement, or another strategy, is one that was never interrupted."""

from __future__ import annotations

from functools import cache, partial

import megatron_cpu
import pytest
import torch
from megatron_jobs import MESHES, batches, gpt, inputs, loss_fn, reference, resume, save

from accel_core import Accelerator
from accel_megatron import Megatron
from accel_testing import run_ranks

HALF = 3
EVERY_RUN = {
    ("cp2", "tp2"),
    ("tp2", "pp2"),
    ("pp2", "single"),
    ("single", "tp2+sp"),
    ("tp2", "ddp"),
    ("fsdp", "pp2"),
    ("pp2", "fsdp"),
}
PLACES = ("single", "tp2", "pp2", "dp2+do", "tp2pp2", "dp2tp2+do", "tp2pp2+sp", "cp2", "fsdp", "ddp", "alone")
PAIRS = [(first, second) for first in PLACES for second in PLACES if {first, second} & {*MESHES}]


@cache
def expected():
    [(losses, _, _)] = run_ranks(reference, 1, 2 * HALF, gated=True)
    return losses


@cache
def saved(first, folder):
    return run_ranks(save, world_of(first), first, HALF, folder)


def world_of(place):
    return {"fsdp": 2, "ddp": 2}.get(place) or MESHES.get(place, (1, {}))[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tmp_path_factory.mktemp("checkpoints"))


@pytest.mark.parametrize(
    ("first", "second"),
    [pair if pair in EVERY_RUN else pytest.param(*pair, marks=pytest.mark.full(group="megatron")) for pair in PAIRS],
)
def test_a_resumed_run_goes_on_as_if_it_had_not_ended(first, second, folder):
    losses = expected()
    for own in saved(first, f"{folder}/{first}"):
        assert own == pytest.approx(losses[:HALF], rel=1e-5)
    for own in run_ranks(resume, world_of(second), second, HALF, f"{folder}/{first}"):
        assert own == pytest.approx(losses[HALF:], rel=1e-5)


def train_with_frozen_embeddings(precision, steps, saved_to=None, loaded_from=None, **mesh):
    """Losses of steps in bfloat16 with masters, in a model whose embeddings are frozen."""
    megatron_cpu.use_cpu()
    strategy = Megatron(distributed_optimizer=True, **mesh)
    accelerator = Accelerator(strategy=strategy, cpu=True, mixed_precision=precision)
    dtype = torch.float32 if precision else torch.bfloat16
    model = accelerator.build_model(partial(gpt, dtype=dtype, tied=False))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("embedding" not in name)
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-2)
    model, optimizer = accelerator.prepare(model, optimizer)
    if loaded_from is not None:
        accelerator.load_state(loaded_from)
    losses = []
    for step in steps:
        losses.append(accelerator.forward_backward(model, batches(step), loss_fn, inputs).item())
        optimizer.step()
        optimizer.zero_grad()
    if saved_to is not None:
        accelerator.save_state(saved_to)
    return losses


@pytest.mark.parametrize("precision", [None, "bf16-true"])
def test_what_is_frozen_in_one_stage_of_a_pipeline_has_no_master_in_checkpoints_of_the_others(precision, tmp_path):
    [whole] = run_ranks(train_with_frozen_embeddings, 1, precision, range(4))
    folder, pipeline = str(tmp_path / "checkpoint"), {"pipeline_parallel": 2}
    for own in run_ranks(train_with_frozen_embeddings, 2, precision, range(2), folder, **pipeline):
        assert own == pytest.approx(whole[:2], rel=5e-3)  # of losses in bfloat16
    for own in run_ranks(train_with_frozen_embeddings, 2, precision, range(2, 4), None, folder, **pipeline):
        assert own == pytest.approx(whole[2:], rel=5e-3)
