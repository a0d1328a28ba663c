"""What one strategy saves on any number of ranks, every other loads on any number, shards or not: all of a run, to the bit."""

from __future__ import annotations

import itertools
import json
import signal
from pathlib import Path
from typing import NamedTuple

import pytest
import safetensors.torch
import torch
from any_to_any_jobs import (
    AFTER,
    WEIGHT,
    Case,
    Loaded,
    Saved,
    Source,
    Transformer,
    killed_in_a_save,
    loaded_by_ranks,
    on_two_ranks,
    saved_by_ranks,
)

from accel_core import load_checkpoint_in_model
from accel_testing import RanksFailed, run_ranks

pytestmark = pytest.mark.timeout(7200)  # every launch has a limit of its own

WORLDS = (1, 2, 4)
PLACES = [("single", 1), ("fsdp", 1), ("ddp", 2), ("fsdp", 2), ("kept", 2), ("fsdp", 4), ("hybrid", 4), ("tensor", 4)]
MORE = [("ddp", 4), ("context", 4), ("in parts", 4)]  # where everything is tried
FAR = [("single", 1), ("fsdp", 2), ("tensor", 4)]  # between them are all pairs of worlds, and of ways to lie
LOW = ("fp16", "bf16-true")
TOLERANCE = {"no": 1e-6, "fp16": 1e-2, "bf16-true": 1e-1}  # of a loss, where sums are taken in another order
RELAY = [("fsdp", 2), ("tensor", 4), ("single", 1)]  # each goes on with what the one before has saved


def cases_of(whole):
    """Every checkpoint at every place in every precision; or what each place has saved, and pairs of which none is left out."""
    if whole:
        precisions = ("no", *LOW)
        return [Case(*to, Source(*by, each)) for to in PLACES + MORE for by in PLACES + MORE for each in precisions]
    pairs = [(place, place) for place in PLACES]
    pairs += itertools.product(FAR, FAR)
    pairs += [(place, PLACES[number - 3]) for number, place in enumerate(PLACES)]
    cases = [Case(*to, Source(*by)) for to, by in pairs]
    for precision in LOW:
        cases += [Case(*place, Source("fsdp", 2, precision)) for place in (("single", 1), ("fsdp", 2))]
        cases.append(Case("fsdp", 2, Source("single", 1, precision)))
    cases.append(Case("ddp", 2, Source("fsdp", 2, "fp16")))
    return list(dict.fromkeys(cases))


class Load(NamedTuple):
    """A checkpoint that was loaded on one rank: what was there when it was saved, and what came of it."""

    where: str
    precision: str
    same_place: bool
    saved: Saved
    loaded: Loaded


class Found(NamedTuple):
    """All loads; what every source saved, on rank 0; the steps of a relay; and weights alone, read from each source's files."""

    loads: list[Load]
    saved: dict[Source, Saved]
    relay: list
    exported: dict


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(False, id="sampled", marks=pytest.mark.full),
        pytest.param(True, id="whole", marks=pytest.mark.soak),
    ],
)
def found(request, tmp_path_factory):
    """Launches every world once to save, and once to load."""
    folder, saved, loads, relay = tmp_path_factory.mktemp("any"), {}, [], {}
    cases, timeout = cases_of(request.param), 1800 if request.param else 110
    for world in WORLDS:
        sources = list(dict.fromkeys(case.source for case in cases if case.source.world == world))
        saved[world] = run_ranks(saved_by_ranks, world, folder, sources, timeout=timeout)
    exported = {source: weights_in(source, folder) for ranks in saved.values() for source in ranks[0]}
    legs = {
        4: (RELAY[1][0], Source(*RELAY[0]).within(folder), f"{folder}/leg"),
        1: (RELAY[2][0], f"{folder}/leg", None),
    }
    for world in (4, 2, 1):
        here = [case for case in cases if case.world == world]
        for rank, seen in enumerate(run_ranks(loaded_by_ranks, world, folder, here, legs.get(world), timeout=timeout)):
            relay[world] = seen.pop("relay", [])
            loads += compared(saved, seen, world, rank)
    of_rank_0 = {source: facts for ranks in saved.values() for source, facts in ranks[0].items()}
    return Found(loads, of_rank_0, [*relay[4], *relay[1]], exported)


def compared(saved, seen, world, rank):
    for (strategy, source), loaded in seen.items():
        same_world = source.world == world
        was = saved[source.world][rank if same_world else 0][source]
        where = f"{source} under {strategy} on rank {rank} of {world}:"
        yield Load(where, source.precision, same_world and source.strategy == strategy, was, loaded)


def weights_in(source, folder):
    """By name, what any library reads of the files; and what a plain model reads, strictly."""
    folder = Path(f"{source.within(folder)}-weights")
    parts = {*json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"].values()}
    model = Transformer().to(
        {"no": torch.float64, "fp16": torch.float32, "bf16-true": torch.bfloat16}[source.precision]
    )
    load_checkpoint_in_model(model, folder, strict=True)
    read = [safetensors.torch.load_file(folder / part) for part in sorted(parts)]
    return read, model.state_dict(), model.head.weight is model.tokens.weight


def assert_close(found, expected, where, tolerance=0.0):
    """Nested structures are equal, numbers up to a relative error, tensors to one of the largest of each."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for key, value in expected.items():
            assert_close(found[key], value, f"{where} {key}", tolerance)
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected), where
        for index, value in enumerate(expected):
            assert_close(found[index], value, f"{where} {index}", tolerance)
    elif isinstance(expected, torch.Tensor):
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape), where
        assert ((found - expected).abs() <= tolerance * expected.abs().max()).all(), where
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, rel=tolerance, abs=0.0), where
    else:
        assert found == expected, where


def test_what_one_strategy_saves_every_other_loads_to_the_bit(found):
    """Weights, buffers, moments, groups, steps, learning rates, the loss scale, and what the user registered."""
    for load in found.loads:
        assert_close(load.loaded.at, load.saved.at, load.where)


def test_the_loss_scale_travels(found):
    loads = [load for load in found.loads if load.precision == "fp16"]
    assert {load.saved.at["scale"]["scale"] for load in loads} == {2048.0}  # it began with 1024
    assert {load.loaded.at["scale"]["scale"] for load in loads} == {2048.0}


def test_what_is_saved_is_what_one_process_would_have(found):
    saved = found.saved
    for source, facts in saved.items():
        if source.precision == "no":
            assert_close(facts.at, saved[Source("single", 1)].at, str(source), 1e-9)


def test_ties_survive(found):
    assert all(load.loaded.tied for load in found.loads)


def test_a_run_goes_on_as_if_it_had_not_stopped(found):
    """To the bit where it was saved; elsewhere up to the order in which sums are taken. Samples, rates and scale are the same."""
    for load in found.loads:
        assert len(load.loaded.steps) == AFTER
        tolerance = 0.0 if load.same_place else TOLERANCE[load.precision]
        for (samples, loss, rates), (others, other, expected) in zip(load.loaded.steps, load.saved.steps, strict=True):
            assert (samples, rates) == (others, expected), load.where
            assert loss == pytest.approx(other, rel=tolerance, abs=0.0), load.where
        if load.same_place or load.precision == "no":
            assert_close(load.loaded.end, load.saved.end, load.where, tolerance)
        assert load.loaded.end["scale"] == load.saved.end["scale"]


def test_a_run_that_moves_on_twice_sees_what_it_would_have_seen(found):
    """From two ranks to four, and to one."""
    assert_close(found.relay, found.saved[Source(*RELAY[0])].steps, "relay", 1e-6)


def test_weights_alone_are_plain_files_in_parts(found):
    for source, (parts, loaded, tied) in found.exported.items():
        weights = found.saved[source].at["weights"]
        assert len(parts) > 1
        read = {name: value for part in parts for name, value in part.items()}
        assert_close(loaded, weights, str(source))
        assert_close(read, {name: weights[name] for name in weights if name != "head.weight"}, str(source))
        assert tied


def test_the_sample_leaves_out_nothing():
    """No place with what it saved itself, no pair of worlds; and every place loads of another, and is loaded at another."""
    cases = cases_of(whole=False)
    assert {case[:2] for case in cases if case[:2] == case.source[:2]} == set(PLACES)
    assert {(case.world, case.source.world) for case in cases} == set(itertools.product(WORLDS, WORLDS))
    away = [case for case in cases if case[:2] != case.source[:2]]
    assert {case[:2] for case in away} == {case.source[:2] for case in away} == set(PLACES)
    assert {case.source.precision for case in away} == {"no", *LOW}


@pytest.fixture(scope="module")
def facts(tmp_path_factory):
    """What two ranks saw, of which the second was killed before in a save of another run."""
    folder = tmp_path_factory.mktemp("two")
    with pytest.raises(RanksFailed) as failed:
        run_ranks(killed_in_a_save, 2, f"{folder}/killed")
    assert failed.value.reports[1].exit_code == -signal.SIGKILL, failed.value
    return run_ranks(on_two_ranks, 2, folder, timeout=100)


def test_a_kill_in_a_save_leaves_the_checkpoint_before_it(facts):
    """It is loaded, trained on, and saved over."""
    for resumed, uninterrupted in (rank["kill"] for rank in facts):
        assert resumed == uninterrupted


@pytest.mark.parametrize("strategy", ["fsdp", "kept"])
def test_a_save_in_an_open_window_says_when_to_save(facts, strategy):
    for rank in facts:
        assert "after 1 of 2 micro-batches" in rank[strategy].said
        assert "Save when accelerator.sync_gradients is True" in rank[strategy].said


@pytest.mark.parametrize("strategy", ["fsdp", "kept"])
def test_a_load_in_an_open_window_drops_the_gradients_of_it(facts, strategy):
    for rank in facts:
        assert rank[strategy].held > rank[strategy].kept == 0
        assert_close(rank[strategy].inside, rank[strategy].fresh, strategy)


def test_saving_and_loading_need_a_part_of_one_tensor_beside_what_is_trained(facts):
    """A rank has half of six weights, and twice as much in AdamW; a copy of the former would be seen."""
    if "memory" not in facts[0]:
        pytest.skip("the kernel does not measure peaks")
    for saving, loading, copying in (rank["memory"] for rank in facts):
        assert max(saving, loading) <= WEIGHT
        assert copying > 2 * WEIGHT
