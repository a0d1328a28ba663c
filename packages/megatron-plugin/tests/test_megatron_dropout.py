"""Dropout after a checkpoint: the streams of each tensor-parallel rank go on with the same sizes, and begin anew with others."""

from __future__ import annotations

import math
from functools import cache

import pytest
import torch
from megatron_jobs import MESHES, Run, placed

from accel_core import Accelerator, set_seed
from accel_megatron import Megatron
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


def drawn(mesh, builds, **places):
    """Of models that are built one after the other: their first weights, and what is drawn for dropout behind that."""
    import megatron_jobs
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    megatron_jobs.megatron_cpu.use_cpu()
    megatron_jobs.fill = lambda chunk: None  # no weights by name
    accelerator = Accelerator(strategy=Megatron(**mesh), cpu=True)
    set_seed(1)
    torch.initial_seed = lambda: 1  # as on a GPU, where seeding its stream leaves that of the CPU alone

    def factory(parallel, **place):
        return megatron_jobs.gpt(parallel, **{**place, **places}, use_cpu_initialization=False, tied=False)

    models = [accelerator.build_model(factory) for _ in range(builds)]
    weights = [next(each for name, each in m.named_parameters() if name.endswith("linear_qkv.weight")) for m in models]
    with get_cuda_rng_tracker().fork():
        tracked = torch.rand(3).tolist()
    return [each.flatten()[:3].tolist() for each in weights], tracked, torch.rand(3).tolist()


def test_replicas_have_equal_weights_and_dropout_of_their_own_and_models_have_weights_of_their_own():
    (first, second) = run_ranks(drawn, 2, {}, 2)
    assert first[0] == second[0]
    assert first[1] != second[1]
    assert first[2] != second[2]
    assert first[0][0] != first[0][1]


def test_stages_have_weights_and_dropout_of_their_own():
    """Those in the middle, which have no embeddings."""
    middle = {"pre_process": False, "post_process": False}
    (first, second) = run_ranks(drawn, 2, {"pipeline_parallel": 2}, 1, **middle)
    assert first[0] != second[0]
    assert first[1] != second[1]
