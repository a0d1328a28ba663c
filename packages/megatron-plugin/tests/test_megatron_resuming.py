"""A run that goes on under another arrangement, or another strategy, is one that was never interrupted."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from megatron_jobs import MESHES, Run, reference, resume, save

from accel_testing import run_ranks

HALF = 3
EVERY_RUN = {
    ("tp2", "pp2"),
    ("pp2", "single"),
    ("single", "tp2+sp"),
    ("tp2", "ddp"),
    ("fsdp", "pp2"),
    ("pp2", "fsdp"),
    ("zero2", "pp2"),
    ("tp2", "zero3"),
}
PLACES = (
    "single",
    "tp2",
    "pp2",
    "dp2+do",
    "tp2pp2",
    "dp2tp2+do",
    "tp2pp2+sp",
    "fsdp",
    "ddp",
    "alone",
    "zero1",
    "zero2",
    "zero3",
)
PAIRS = [(first, second) for first in PLACES for second in PLACES if {first, second} & {*MESHES}]


@cache
def expected():
    [(losses, _, _)] = run_ranks(reference, 1, 2 * HALF, gated=True)
    return losses


@cache
def saved(first, folder):
    return run_ranks(save, world_of(first), first, HALF, folder)


def world_of(place):
    return dict.fromkeys(("fsdp", "ddp", "zero1", "zero2", "zero3"), 2).get(place) or MESHES.get(place, (1, {}))[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tmp_path_factory.mktemp("checkpoints"))


@pytest.mark.parametrize(
    ("first", "second"),
    [pair if pair in EVERY_RUN else pytest.param(*pair, marks=pytest.mark.full) for pair in PAIRS],
)
def test_a_resumed_run_goes_on_as_if_it_had_not_ended(first, second, folder):
    losses = expected()
    for own in saved(first, f"{folder}/{first}"):
        assert own == pytest.approx(losses[:HALF], rel=1e-5)
    for own in run_ranks(resume, world_of(second), second, HALF, f"{folder}/{first}"):
        assert own == pytest.approx(losses[HALF:], rel=1e-5)


def dropping(mesh, first, steps, folder=None, loads=False):
    """Losses of steps under dropout, whose masks come from the streams of each tensor-parallel rank."""
    torch.manual_seed(100 if loads else 7)  # what a run that is resumed began with is of no account
    run = Run(MESHES[mesh][1], dropout=0.3)
    if loads:
        run.accelerator.load_state(folder)
    losses = []
    for step in range(first, first + steps):
        losses.append(run.window(step).item())
        run.step()
    if folder is not None and not loads:
        run.accelerator.save_state(folder)
    return losses


@pytest.mark.parametrize("mesh", ["tp2", "tp2+sp", "pp2", "dp2+do"])
def test_dropout_goes_on_with_the_same_masks_in_the_same_arrangement(mesh, tmp_path):
    whole = run_ranks(dropping, 2, mesh, 0, 2 * HALF)
    began = run_ranks(dropping, 2, mesh, 0, HALF, str(tmp_path / "saved"))
    went_on = run_ranks(dropping, 2, mesh, HALF, HALF, str(tmp_path / "saved"), True)
    for first, second, all_steps in zip(began, went_on, whole, strict=True):
        assert first == all_steps[:HALF]
        assert second == pytest.approx(all_steps[HALF:], rel=1e-6)  # another mask is another loss in the second digit
