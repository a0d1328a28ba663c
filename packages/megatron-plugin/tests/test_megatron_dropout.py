"""Dropout after a checkpoint: the streams of each tensor-parallel rank go on with the same sizes, and begin anew with others."""

from __future__ import annotations

import math
from functools import cache

import pytest
from megatron_jobs import MESHES, Run, placed

from accel_testing import run_ranks

HALF, DROPOUT = 3, 0.2


def losses_of(run, steps):
    found = []
    for step in steps:
        found.append(run.window(step).item())
        run.step()
    return found


def uninterrupted(place, folder):
    """Trains on after it has saved halfway."""
    run = Run(placed(place), dropout=DROPOUT)
    before = losses_of(run, range(HALF))
    run.accelerator.save_state(folder)
    return before, losses_of(run, range(HALF, 2 * HALF)), streams()


def resumed(place, folder):
    run = Run(placed(place), dropout=DROPOUT)
    run.accelerator.load_state(folder)
    return losses_of(run, range(HALF, 2 * HALF)), streams()


def streams():
    """Where the random streams of this rank are."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    return {name: state.tolist() for name, state in get_cuda_rng_tracker().get_states().items()}


@cache
def saved(place, folder):
    return run_ranks(uninterrupted, MESHES[place][0], place, folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tmp_path_factory.mktemp("dropout"))


@pytest.mark.parametrize(
    "place",
    [
        each if each == "tp2" else pytest.param(each, marks=pytest.mark.full(group="megatron"))
        for each in ("tp2", "tp2+sp", "pp2")
    ],
)
def test_dropout_draws_on_with_the_same_sizes_as_if_the_run_had_not_ended(place, folder):
    whole = saved(place, f"{folder}/{place}")
    for (before, after, ended), (found, ended_too) in zip(
        whole, run_ranks(resumed, MESHES[place][0], place, f"{folder}/{place}"), strict=True
    ):
        assert found == pytest.approx(
            after, rel=1e-6
        )  # a window's backwards are divided by the weight of the one before
        assert ended == ended_too
        assert before != after


def test_ranks_that_share_layers_have_streams_of_their_own(folder):
    first, second = (ended for _, _, ended in saved("tp2", f"{folder}/tp2"))
    assert first.keys() == second.keys() != set()
    assert first["model-parallel-rng"] != second["model-parallel-rng"]


def test_with_other_sizes_streams_begin_anew_alike_each_time(folder):
    whole = saved("tp2", f"{folder}/tp2")
    once, again = (run_ranks(resumed, 1, "single", f"{folder}/tp2") for _ in range(2))
    assert once == again
    [(found, _)] = once
    assert found != whole[0][1], "the draws are others"
    assert all(map(math.isfinite, found))
    assert found == pytest.approx(whole[0][1], rel=0.2), "the weights are the same"
