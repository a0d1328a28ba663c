"""A run that goes on under another arrangement, or another strategy, is one that was never interrupted."""

from __future__ import annotations

from functools import cache

import pytest
from megatron_jobs import MESHES, reference, resume, save

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
