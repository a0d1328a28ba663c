"""Batch sizes that fit are found, by all ranks together; what failed attempts held is freed."""

from __future__ import annotations

import gc
import weakref
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d

from accel_core import Accelerator, CollectiveMismatchError, World
from accel_core.base.vocabulary import OUT_OF_MEMORY_MESSAGES
from accel_core.loop.memory import (
    call_allocator,
    clear_device_cache,
    find_executable_batch_size,
    is_out_of_memory,
    release_memory,
)
from accel_testing import RanksFailed, run_ranks

NO_ROOM = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 17 bytes."


class Fits:
    """A function that has room for `limit` samples; remembers what it was called with."""

    __name__ = "train"

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.sizes: list[int] = []

    def __call__(self, batch_size: int, scale: int = 1) -> int:
        self.sizes.append(batch_size)
        if batch_size > self.limit:
            raise RuntimeError(NO_ROOM)
        return batch_size * scale


def test_sizes_shrink_by_a_tenth_until_memory_suffices() -> None:
    train = Fits(100)
    assert find_executable_batch_size(train)(scale=2) == 184
    assert train.sizes == [128, 115, 103, 92]


def test_parentheses_and_arguments_make_no_difference() -> None:
    sizes = []

    @find_executable_batch_size(starting_batch_size=4)
    def train(batch_size: int, model: str, *, epochs: int) -> tuple[str, int]:
        """Trains."""
        sizes.append(batch_size)
        return model, epochs

    @find_executable_batch_size
    def other(batch_size: int) -> int:
        return batch_size

    assert train("net", epochs=3) == ("net", 3)
    assert (train.__name__, train.__doc__, sizes) == ("train", "Trains.", [4])
    assert other() == 128


def test_later_calls_start_with_the_size_that_was_found() -> None:
    train = Fits(2)
    found = find_executable_batch_size(train, starting_batch_size=4)
    assert (found(), found()) == (2, 2)
    assert train.sizes == [4, 3, 2, 2]


@pytest.mark.parametrize("halve", [lambda size: size // 2, lambda: train.sizes[-1] // 2])
def test_the_next_size_may_be_computed_by_the_user(halve) -> None:
    train.sizes.clear()
    assert find_executable_batch_size(train, 32, halve)() == 8
    assert train.sizes == [32, 16, 8]


train = Fits(8)


@pytest.mark.parametrize("next_size", [32, 40, 8.0, None])
def test_a_next_size_that_is_not_smaller_is_refused(next_size) -> None:
    found = find_executable_batch_size(Fits(8), 32, lambda _: next_size)
    with pytest.raises(ValueError, match=f"returned {next_size} after a batch size of 32, which did not fit"):
        found()


def test_the_search_ends_when_nothing_fits() -> None:
    train = Fits(0)
    found = find_executable_batch_size(train, starting_batch_size=3)
    with pytest.raises(
        RuntimeError, match="`train` was called with 3 batch sizes, from 3 to 1, .*you tried to allocate 17"
    ):
        found()
    assert train.sizes == [3, 2, 1]
    train.limit = 2
    assert found() == 2


def test_other_errors_pass_at_once() -> None:
    sizes = []

    @find_executable_batch_size
    def train(batch_size: int) -> None:
        sizes.append(batch_size)
        raise RuntimeError("shapes do not fit")

    with pytest.raises(RuntimeError, match="shapes do not fit"):
        train()
    assert sizes == [128]


@pytest.mark.parametrize("start", [0, -1, 2.5, True, "8"])
def test_the_first_size_is_an_int_of_at_least_one(start) -> None:
    with pytest.raises(ValueError, match=r"starting_batch_size=.*expected an int of at least 1"):
        find_executable_batch_size(Fits(8), start)


def test_an_allocation_that_fails_is_recognised() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**55)
    assert is_out_of_memory(caught.value)


def test_what_says_that_memory_ran_out() -> None:
    assert is_out_of_memory(torch.OutOfMemoryError("no room"))
    assert is_out_of_memory(MemoryError())
    assert all(is_out_of_memory(RuntimeError(f"error: {part}.")) for part in OUT_OF_MEMORY_MESSAGES)
    assert not is_out_of_memory(RuntimeError("device-side assert triggered"))
    assert not is_out_of_memory(ValueError("out of memory"))
    assert not is_out_of_memory(dist.DistNetworkError("closed by peer\nrank 1 failed: OutOfMemoryError: out of memory"))


def test_a_failed_attempt_keeps_no_tensors_alive_though_somebody_keeps_its_error() -> None:
    errors, tensors, alive = [], [], []

    @find_executable_batch_size(starting_batch_size=2)
    def train(batch_size: int) -> None:
        alive.extend(tensor() is not None for tensor in tensors)
        activations = torch.ones(batch_size)
        tensors.append(weakref.ref(activations))
        try:
            raise RuntimeError(NO_ROOM)
        except RuntimeError as error:
            errors.append(error)
            if batch_size == 2:
                raise RuntimeError(NO_ROOM) from error

    train()
    assert alive == [False]


class Cycle:
    def __init__(self) -> None:
        self.itself = self


@pytest.fixture
def no_automatic_collection():
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_automatic_collection")
def test_what_is_released_is_gone() -> None:
    model, other, cycle = nn.Linear(2, 2), nn.Linear(2, 2), weakref.ref(Cycle())
    gone = weakref.ref(model)
    model, other = release_memory(model, other)
    assert (model, other, gone(), cycle()) == (None, None, None, None)
    assert release_memory() == []


@pytest.mark.usefixtures("no_automatic_collection")
def test_clearing_the_cache_collects_garbage_when_asked() -> None:
    cycle = weakref.ref(Cycle())
    clear_device_cache()
    assert cycle() is not None
    clear_device_cache(garbage_collection=True)
    assert cycle() is None


class Vendor:
    """The module of a device whose allocator is of a kind that torch does not know."""

    def __init__(self) -> None:
        self.calls: list[tuple[object, ...]] = []

    def empty_cache(self) -> None:
        self.calls.append(("empty_cache",))

    def max_memory_allocated(self, device: int) -> int:
        self.calls.append(("max_memory_allocated", device))
        return 7


def refuse(*_: object) -> None:
    """What torch 2.13 says of an allocator that is no `c10::DeviceAllocator`."""
    raise RuntimeError("device_allocator INTERNAL ASSERT FAILED: Allocator for npu is not a DeviceAllocator.")


@pytest.fixture
def vendor(monkeypatch: pytest.MonkeyPatch) -> Vendor:
    module = Vendor()
    monkeypatch.setattr(torch._C, "_accelerator_isAllocatorInitialized", refuse)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("cuda"))
    monkeypatch.setattr(torch, "get_device_module", lambda device=None: module)
    return module


def test_an_allocator_of_another_kind_is_asked_by_its_own_module(vendor: Vendor) -> None:
    clear_device_cache()
    release_memory(None)
    assert find_executable_batch_size(Fits(115))() == 115
    assert vendor.calls == [("empty_cache",)] * 3
    assert call_allocator("max_memory_allocated", 1) == 7
    assert vendor.calls[-1] == ("max_memory_allocated", 1)
    assert call_allocator("reset_peak_memory_stats", 1) is None  # which this one has not


def test_clearing_the_cache_asks_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that has asked one cannot fork workers that use it; with cpu=True nobody expects that."""
    asked: list[str] = []
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: asked.append("available") or False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: asked.append("cuda") or False)
    Accelerator(cpu=True).free_memory()
    assert asked == []


def outcome(function, *args):
    try:
        return function(*args)
    except RuntimeError as error:
        return type(error).__name__, str(error)


def attempts_together():
    """What each rank saw of searches that end for all ranks."""
    accelerator = Accelerator()
    rank = accelerator.process_index
    seen = {}

    def search(name, limit, start=8):
        train = Fits(limit)
        result = outcome(find_executable_batch_size(train, start))
        seen[name] = result, train.sizes

    search("all run out", 7)
    search("one runs out", 5 + 3 * rank)
    search("nothing fits on one", 8 * rank, start=2)
    search("other sizes", 9, start=8 + rank)

    @find_executable_batch_size
    def breaks(batch_size: int) -> None:
        if rank == 1:
            raise KeyError("samples")

    try:
        breaks()
    except (RuntimeError, KeyError) as error:
        seen["one breaks"] = type(error).__name__, str(error)

    @find_executable_batch_size(starting_batch_size=4)
    def train(batch_size: int) -> list[float]:
        accelerator.free_memory()
        model = accelerator.prepare(nn.Linear(1, 1))
        accelerator.backward(model(torch.full((batch_size, 1), 1.0 + rank)).mean())
        if batch_size + rank > 4:  # rank 0 has begun the same collectives, and has room for one more sample
            raise RuntimeError(NO_ROOM)
        return [*model.module.weight.grad.tolist(), batch_size]

    seen["training"] = train()

    pending = []

    @find_executable_batch_size
    def alone(batch_size: int) -> None:
        if rank == 0:
            pending.append(dist.all_reduce(torch.ones(1), async_op=True))
        raise RuntimeError(NO_ROOM)

    seen["between collectives"] = outcome(alone)
    if rank == 1:
        dist.all_reduce(torch.ones(1))
    for work in pending:
        work.wait()
    return seen


def test_ranks_agree_about_every_attempt() -> None:
    first, second = run_ranks(attempts_together, 2)
    assert first["all run out"] == second["all run out"] == (7, [8, 7])
    assert first["one runs out"] == second["one runs out"] == (5, [8, 7, 6, 5])
    assert [seen["nothing fits on one"][1] for seen in (first, second)] == [[2, 1], [2, 1]]
    assert "The last attempt: DefaultCPUAllocator" in first["nothing fits on one"][0][1]
    assert "there was room on this rank, but not on another one" in second["nothing fits on one"][0][1]
    for seen in (first, second):
        kind, message = seen["other sizes"][0]
        assert kind == CollectiveMismatchError.__name__
        assert "The ranks are in different attempts" in message
        assert "rank 1: `train` with a batch size of 9 done" in message
        assert seen["training"] == [[1.5], 3]
        assert "Memory ran out between two collectives" in seen["between collectives"][1]
    assert first["one breaks"][0] == "RuntimeError"
    assert "rank 1: `breaks` with a batch size of 128 raised KeyError: 'samples'" in first["one breaks"][1]
    assert second["one breaks"] == ("KeyError", "'samples'")


def one_in_a_collective():
    World.current(timeout=timedelta(seconds=40))

    @find_executable_batch_size(patience=1)
    def train(batch_size: int) -> None:
        if dist.get_rank() == 1:
            raise RuntimeError(NO_ROOM)
        dist.all_reduce(torch.ones(1))

    train()


def test_a_rank_that_runs_out_of_memory_alone_ends_all_with_the_reason() -> None:
    with pytest.raises(RanksFailed) as failure:
        run_ranks(one_in_a_collective, 2, timeout=30)
    waiting, alone = failure.value.reports
    assert "ranks [0] have not ended the attempt. A rank that runs out of memory alone" in alone.traceback
    assert "`train` was tried with a batch size of 128, and DefaultCPUAllocator" in waiting.traceback


def one_never_ends():
    world = World.current(timeout=timedelta(seconds=40))
    store = distributed_c10d._get_default_store()
    if world.rank == 0:
        store.set_timeout(timedelta(seconds=1))

    @find_executable_batch_size(patience=1)
    def train(batch_size: int) -> None:
        if world.rank == 1:
            store.wait(["given up"], timedelta(seconds=30))
            raise RuntimeError(NO_ROOM)

    result = outcome(train)
    if world.rank == 0:
        store.set_timeout(timedelta(seconds=30))
        store.set("given up", "")
    return result[1]


def test_a_rank_that_has_room_gives_up_when_the_store_does() -> None:
    first, second = run_ranks(one_never_ends, 2)
    assert "and there was room on this rank; but ranks [1] have not ended the attempt" in first
    assert "ranks [0] have not ended the attempt" in second
