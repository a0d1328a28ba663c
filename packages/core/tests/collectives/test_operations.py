"""The functions for code that holds no Accelerator: those of the collectives, in the world of the process."""

from __future__ import annotations

import inspect
import random
import warnings

import pytest
import torch

from accel_core.accelerator import Accelerator
from accel_core.collectives import operations
from accel_core.processes.world import World
from accel_testing import run_ranks


def use_each(size):
    """No Accelerator and no World is made before: the first call starts the group."""
    rank = operations.gather_object([None]).index(None) + World.current().rank
    assert operations.gather(torch.tensor([rank])).tolist() == list(range(size))
    assert operations.gather_object((rank, "x")) == [item for each in range(size) for item in (each, "x")]
    assert operations.reduce(torch.tensor(rank), "sum").item() == sum(range(size))
    assert operations.reduce(torch.tensor(float(rank)), reduction="mean", scale=2.0).item() == size - 1
    assert operations.broadcast({"a": torch.tensor(rank)}, from_process=size - 1)["a"].item() == size - 1
    items = [rank, {"rank": rank}]
    assert operations.broadcast_object_list(items, from_process=size - 1) is items
    assert items == [size - 1, {"rank": size - 1}]
    padded = operations.pad_across_processes(torch.full((rank,), 7), dim=0, pad_index=1, pad_first=True)
    assert padded.tolist() == [1] * (size - 1 - rank) + [7] * rank
    operations.wait_for_everyone()


@pytest.mark.parametrize("size", [1, 2, 3])
def test_each_function_works_in_the_world_of_the_process(size):
    run_ranks(use_each, size, size)


def test_reduce_has_no_default_that_could_be_taken_for_another():
    """`Accelerator.reduce` sums; functions of this name average elsewhere."""
    assert inspect.signature(Accelerator.reduce).parameters["reduction"].default == "sum"
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'reduction'"):
        operations.reduce(torch.ones(1))


def streams(generator):
    """What each stream would give next; none of them is moved."""
    saved = torch.get_rng_state(), generator.get_state(), random.getstate()
    drawn = torch.rand(()).item(), torch.rand((), generator=generator).item(), random.random()
    torch.set_rng_state(saved[0])
    generator.set_state(saved[1])
    random.setstate(saved[2])
    return drawn


def synchronize_in_turn():
    world = World.current()
    calls = {
        "torch by default": lambda generator: operations.synchronize_rng_state(),
        "generator by default": lambda generator: operations.synchronize_rng_state(generator=generator),
        "torch": lambda generator: operations.synchronize_rng_state("torch"),
        "generator": lambda generator: operations.synchronize_rng_state("generator", generator),
        "both": lambda generator: operations.synchronize_rng_states(["torch", "generator"], generator),
        "none": lambda generator: operations.synchronize_rng_states([], None),
    }
    found = {}
    for name, call in calls.items():
        torch.manual_seed(100 + world.rank)
        random.seed(100 + world.rank)
        generator = torch.Generator().manual_seed(200 + world.rank)
        before = streams(generator)
        call(generator)
        found[name] = before, streams(generator)
    return found


def test_streams_become_rank_zero_s_and_all_others_go_on():
    first, *others = run_ranks(synchronize_in_turn, 3)
    shared = {
        "torch by default": [True, False],
        "generator by default": [False, True],
        "torch": [True, False],
        "generator": [False, True],
        "both": [True, True],
        "none": [False, False],
    }
    for name, expected in shared.items():
        assert first[name][0] == first[name][1], "rank 0's streams stay where they were"
        for other in others:
            before, after = other[name]
            wanted = [
                zero if same else own
                for zero, own, same in zip(first[name][0], before, [*expected, False], strict=True)
            ]
            assert list(after) == wanted, name
            assert all(zero != own for zero, own in zip(first[name][0], before, strict=True))


def synchronize_wrongly():
    world = World.current()
    last = world.rank == world.size - 1
    generator = torch.Generator()
    calls = {
        "no generator": lambda: operations.synchronize_rng_states(["generator"]),
        "none on one rank": lambda: operations.synchronize_rng_state("generator", None if last else generator),
        "unknown": lambda: operations.synchronize_rng_states(["trch"] if last else ["torch"]),
        "no list": lambda: operations.synchronize_rng_states("torch" if last else ["torch"]),
        "other streams": lambda: operations.synchronize_rng_states(["generator", "torch"][: 1 + last], generator),
    }
    outcomes = {}
    for name, call in calls.items():
        try:
            outcomes[name] = ("nothing", str(call()))
        except Exception as error:
            outcomes[name] = (type(error).__name__, str(error))
        operations.synchronize_rng_state("torch")  # and life goes on
    return outcomes


def test_streams_that_do_not_fit_raise_on_every_rank():
    first, last = run_ranks(synchronize_wrongly)
    text = "rng_types has 'generator', but no generator was given. Pass generator=torch.Generator(), the one"
    assert first["no generator"][0] == last["no generator"][0] == "ValueError"
    assert text in first["no generator"][1]
    wrong = "CollectiveMismatchError"
    for name, kind in {"none on one rank": "ValueError", "unknown": "ValueError", "no list": "TypeError"}.items():
        assert (first[name][0], last[name][0]) == (wrong, kind)
        assert "rank 0: called synchronize_rng_states" in first[name][1]
        assert f"rank 1: {kind}: {last[name][1]}" in first[name][1]
    assert "Type 'torch' if that was meant." in last["unknown"][1]
    assert first["other streams"] == last["other streams"]
    assert "rank 0: synchronize_rng_states: dict('generator': list(*))" in first["other streams"][1]


def test_alone_nothing_moves_and_what_has_no_effect_is_said():
    torch_state, generator = torch.get_rng_state(), torch.Generator().manual_seed(1)
    operations.synchronize_rng_state()
    operations.synchronize_rng_state(generator=generator)
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert generator.initial_seed() == 1
    with pytest.raises(ValueError, match="no generator was given"):
        operations.synchronize_rng_state("generator")
    with pytest.warns(
        UserWarning, match=r"was given a generator, but rng_types=\['torch'\] leaves it alone\. Add"
    ) as caught:
        operations.synchronize_rng_states(["torch"], generator)
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        operations.synchronize_rng_states(["generator"], generator)


def test_every_function_says_whether_it_is_collective():
    for name in operations.__all__:
        assert "ollective" in inspect.getdoc(getattr(operations, name)), name
