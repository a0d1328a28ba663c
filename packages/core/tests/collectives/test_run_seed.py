"""Seeds: every generator is seeded, the run's seed is agreed on, and derived seeds are the same everywhere."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import torch

from accel_core.base.seeds import derive_seed
from accel_core.collectives.run_seed import agree_seed, set_seed
from accel_core.processes.world import World
from accel_testing import run_ranks


@pytest.fixture(autouse=True)
def generators_restored():
    states = (
        random.getstate(),
        np.random.get_state(),
        torch.get_rng_state(),
        torch.are_deterministic_algorithms_enabled(),
    )
    yield
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])
    torch.use_deterministic_algorithms(states[3])


def draws():
    return random.random(), np.random.rand(), torch.rand(()).item()


def run_python(script, *, hash_seed="random"):
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        env={"PYTHONHASHSEED": hash_seed, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_one_seed_repeats_python_numpy_and_torch():
    """The seeds' set_seed."""
    set_seed(7)
    first = draws()
    set_seed(8)
    other = draws()
    set_seed(7)
    assert draws() == first
    assert all(a != b for a, b in zip(first, other, strict=True))


def test_small_seeds_are_the_libraries_own():
    set_seed(42)
    assert draws() == (
        random.Random(42).random(),
        np.random.RandomState(42).rand(),
        torch.rand((), generator=torch.Generator().manual_seed(42)).item(),
    )


@pytest.mark.parametrize("seed", [2**32, 2**63, 2**64 - 1])
def test_seeds_beyond_numpy_s_range_are_derived_instead_of_failing(seed):
    set_seed(seed)
    first = draws()
    assert torch.initial_seed() == seed
    assert first[1] == np.random.RandomState(derive_seed(seed) % 2**32).rand()
    set_seed(seed)
    assert draws() == first


def test_a_numpy_integer_is_an_integer():
    set_seed(np.int64(42))
    assert torch.initial_seed() == 42


@pytest.mark.parametrize("seed", [None, "42", 4.0])
def test_what_is_no_integer_is_refused(seed):
    with pytest.raises(TypeError, match="cannot be interpreted as an integer"):
        set_seed(seed)


@pytest.mark.parametrize("given", [None, ":16:8"])
def test_deterministic_sets_what_kernels_of_matrix_products_read_unless_it_is_set(monkeypatch, given):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", str(given))  # and so it is as before when the test has ended
    if given is None:
        monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    set_seed(1)
    assert os.environ.get("CUBLAS_WORKSPACE_CONFIG") == given
    set_seed(1, deterministic=True)
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == (given or ":4096:8")


def test_deterministic_switches_on_and_never_off(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    set_seed(1)
    assert not torch.are_deterministic_algorithms_enabled()
    set_seed(1, deterministic=True)
    assert torch.are_deterministic_algorithms_enabled()
    set_seed(1)
    assert torch.are_deterministic_algorithms_enabled()


def test_numpy_is_not_needed():
    script = """
        import sys
        sys.modules["numpy"] = None
        from accel_core.collectives.run_seed import set_seed
        import torch
        set_seed(2**40)
        print(torch.initial_seed() == 2**40)
    """
    assert run_python(script) == "True"


def seeded_by_rank(seed, device_specific):
    set_seed(seed, device_specific=device_specific)
    mine = torch.initial_seed(), *draws()
    return mine, agree_seed(World.current())


def test_device_specific_adds_the_rank_and_the_run_keeps_one_seed():
    (first, agreed), (second, agreed_too) = run_ranks(seeded_by_rank, 2, 10, True)
    assert (first[0], second[0]) == (10, 11)
    assert all(a != b for a, b in zip(first, second, strict=True))
    assert agreed == agreed_too == 10


def test_the_largest_seed_wraps_around_instead_of_overflowing():
    (first, agreed), (second, agreed_too) = run_ranks(seeded_by_rank, 2, 2**64 - 1, True)
    assert (first[0], second[0]) == (2**64 - 1, 0)
    assert agreed == agreed_too == 2**64 - 1


def agree_in_an_unseeded_process():
    torch.seed()  # a fresh process is seeded at random; a forked rank has its parent's seed
    world = World.current()
    random.seed(3)
    np.random.seed(3)
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    agreed = agree_seed(world)
    torch.rand(10)
    again = agree_seed(world)
    torch.set_rng_state(before[2])
    assert random.getstate() == before[0]
    assert np.random.get_state()[1].tolist() == before[1]
    return torch.initial_seed(), agreed, again


def test_ranks_agree_on_rank_zero_s_seed_however_much_was_drawn():
    first, second = run_ranks(agree_in_an_unseeded_process, 2)
    assert first[0] != second[0]
    assert first[1:] == second[1:] == (first[0], first[0])


def test_agreeing_leaves_torch_s_stream_where_it_was():
    state = torch.get_rng_state()
    assert agree_seed(World.current()) == torch.initial_seed()
    assert torch.equal(torch.get_rng_state(), state)


def test_an_unseeded_process_has_a_random_seed():
    """Also a run that set no seed has one to save; two such runs differ."""
    script = "import torch; print(torch.initial_seed())"
    assert run_python(script) != run_python(script)


def test_derived_seeds_are_what_they_have_always_been():
    """Changing these values changes the data order of every checkpoint ever written."""
    assert derive_seed(0) == 4761921975702974394
    assert derive_seed(42, 0) == 6369099232356431040
    assert derive_seed(42, 1) == 3035961754409659286
    assert derive_seed(2**64 - 1, -1) == 7532246112593380758


def test_derived_seeds_do_not_depend_on_hash_randomisation():
    script = "from accel_core.collectives.run_seed import derive_seed; print(derive_seed(42, 1))"
    assert run_python(script, hash_seed="1") == str(derive_seed(42, 1))


def test_derived_seeds_are_63_bits_and_distinct():
    seeds = {derive_seed(seed, epoch) for seed in range(100) for epoch in range(100)}
    assert len(seeds) == 10_000
    assert max(seeds).bit_length() == 63
    assert derive_seed(1, 23) != derive_seed(12, 3)
    assert derive_seed(1, 2) != derive_seed(2, 1)
    assert derive_seed(np.int64(5)) == derive_seed(5)


def test_derived_seeds_take_integers_only():
    with pytest.raises(TypeError, match="'str' object cannot be interpreted as an integer"):
        derive_seed(1, "2")
