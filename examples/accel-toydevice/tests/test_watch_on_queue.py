"""A rank that is missing is named, while the others wait for their devices, in no collective that anybody has marked.

The device goes on by itself, as that of a GPU does: an all-reduce in a backward returns at once, and the host waits later.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

import accel_toydevice  # noqa: F401  (gives torch the device, here and on every rank that imports this file)
from accel_core import Accelerator, World
from accel_testing import RanksFailed, run_ranks
from accel_testing.ranks import RankReport

WITHIN = 30.0  # seconds that rank 0 has once rank 1 is gone; it takes five where nothing else runs
AT_ONCE = 3

pytestmark = pytest.mark.timeout(400)  # the first test waits for the launches of all


def be_stopped(accelerator: Accelerator) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def be_killed(accelerator: Accelerator) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def leave(accelerator: Accelerator) -> None:
    raise StopIteration


def gather(accelerator: Accelerator) -> None:
    accelerator.gather(torch.ones(2, device=accelerator.device))  # only here


def all_gather(accelerator: Accelerator) -> None:
    numbers = torch.ones(8, device=accelerator.device)
    dist.all_gather_single(torch.empty(16, device=accelerator.device), numbers)
    numbers.sum().item()  # rank 1 waits


def keep_record(includeCollectives: bool = True) -> bytes:
    """Stands for a flight recorder of the device's backend: that of gloo, which does the work, with names for groups."""
    found = json.loads(torch._C._distributed_c10d._dump_fr_trace_json(includeCollectives=includeCollectives))
    for entry in found.get("entries", ()):
        entry["process_group"] = [f"number {entry['pg_id']}", ""]
    return json.dumps(found).encode()


def in_item(loss: torch.Tensor) -> None:
    loss.item()  # rank 0 waits


def in_a_copy(loss: torch.Tensor) -> None:
    loss.detach().to("cpu")  # rank 0 waits


def in_a_full_queue(loss: torch.Tensor) -> None:
    number = loss.detach()
    for _ in range(1000):
        number = number + 1  # rank 0 waits


WAITS = {"item": in_item, "copy": in_a_copy, "queue": in_a_full_queue}


def train(missing: Callable[[Accelerator], None] | None, where: str, slow: float = 0.0) -> str:
    """Rank 1 does something else in its third step; rank 0 goes on, and waits for its device."""
    if missing is all_gather:
        torch._C._distributed_c10d._dump_toyccl_trace_json = keep_record
    accelerator = Accelerator()
    model = accelerator.prepare(torch.nn.Linear(4, 1))
    data = torch.ones(2, 4, device=accelerator.device)
    for step in range(4):
        if step == 2 and accelerator.process_index == 1:
            time.sleep(slow)
            try:
                if missing is not None:
                    missing(accelerator)
            except StopIteration:
                break
        loss = model(data).sum()
        accelerator.backward(loss)
        WAITS[where](model.module.weight.grad.sum())
    accelerator.end_training()
    return "trained"


Launches = dict[Any, Future[list[Any]]]
MISSING = [
    (be_stopped, "item", "was stopped (SIGSTOP, or a debugger)"),
    (be_stopped, "copy", "was stopped (SIGSTOP, or a debugger)"),
    (be_stopped, "queue", "was stopped (SIGSTOP, or a debugger)"),
    (be_killed, "item", "ended without a word"),
    (be_killed, "queue", "ended without a word"),
    (leave, "item", "has ended its training, at "),
    (gather, "item", "in gather() for"),
    (all_gather, "item", "in a collective on its device for"),
]


@pytest.fixture(scope="module")
def launches() -> Launches:
    run = partial(partial, run_ranks, timeout=90, grace=WITHIN, env={"TOY_QUEUE_LENGTH": "64"})
    calls = {(missing, where): run(train, 2, missing, where) for missing, where, _ in MISSING}
    calls["slow"] = run(train, 2, None, "item", 9.0)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return {name: pool.submit(call) for name, call in calls.items()}


def reports_of(launch: Future[list[Any]]) -> list[RankReport]:
    with pytest.raises(RanksFailed) as caught:
        launch.result()
    return caught.value.reports


@pytest.mark.parametrize(("missing", "where", "reason"), MISSING, ids=lambda value: getattr(value, "__name__", value))
def test_rank_is_named_while_the_host_waits_for_its_device(
    launches: Launches, missing: Callable[[Accelerator], None], where: str, reason: str
) -> None:
    waiting = reports_of(launches[missing, where])[0]
    said = waiting.traceback + waiting.output
    assert "killed" not in waiting.state, str(waiting)
    assert f"rank 1: {'process ' if missing in (be_stopped, be_killed) else ''}" in said, str(waiting)
    assert reason in said, str(waiting)
    if missing is all_gather:
        assert "collective: gloo:all_reduce, number " in said, str(waiting)
        assert "collective: gloo:all_gather" in said, str(waiting)
        assert "# rank 1 waits" in said, str(waiting)
    elif missing is not be_killed:  # whose end its peer may also learn from what breaks
        assert "rank 0 waits in backward() on its device for rank 1, in vain" in said, str(waiting)
        assert "# rank 0 waits" in said, str(waiting)


def test_rank_that_is_only_slow_is_waited_for(launches: Launches) -> None:
    assert launches["slow"].result() == ["trained"] * 2


def bound() -> str:
    accelerator = Accelerator()
    device = getattr(dist.group.WORLD, "bound_device_id", None)
    accelerator.end_training()
    return str(device)


def test_group_is_bound_to_the_device_of_its_rank() -> None:
    assert run_ranks(bound, 2, timeout=60) == ["toy:0", "toy:1"]


def connect_as_a_backend_that_splits() -> tuple[list[str], str]:
    """Which devices are connected, where the backend could split groups as NCCL can, for which all ranks must come."""
    from torch._C._distributed_c10d import Backend

    connected: list[str] = []
    Backend.supports_splitting = property(lambda _: True)
    Backend.eager_connect_single_device = lambda _, device: connected.append(str(device))
    Backend.perform_nocolor_split = lambda *_: connected.append("split")
    accelerator = Accelerator()
    world = World.current()
    world.subgroup([0])
    dist.new_group([0], backend="gloo")
    device = getattr(dist.group.WORLD, "bound_device_id", None)
    accelerator.end_training()
    return connected, str(device)


def test_groups_are_connected_at_once_and_never_split_from_the_whole() -> None:
    assert run_ranks(connect_as_a_backend_that_splits, 2, timeout=60) == [
        (["toy:0", "toy:0"], "None"),
        (["toy:1"], "None"),
    ]


def connections(many: int) -> int:
    """How many sockets gloo beside the device has opened before anything is sent."""
    sys.modules[World.__module__]._MANY = many
    world = World.current()
    known = world._connections
    assert known is not None
    opened = len(known._known)
    world.barrier()
    world.end()
    return opened


def test_gloo_beside_the_device_connects_late_where_there_are_many_ranks() -> None:
    at_once = run_ranks(connections, 2, 256, timeout=60)
    late = run_ranks(connections, 2, 1, timeout=60)
    assert all(few < many for few, many in zip(late, at_once, strict=True)), (late, at_once)


def call_another() -> None:
    """Both ranks are told, while their devices still have collectives to run that fit each other no more."""
    accelerator = Accelerator()
    value = torch.ones(1 << 20, device=accelerator.device)
    for step in range(1000):
        accelerator.reduce(value) if accelerator.process_index == 1 and step == 5 else accelerator.gather(value)


@pytest.mark.parametrize("attempt", range(4))
def test_ranks_that_called_different_collectives_end_by_themselves(attempt: int) -> None:
    """In about half of the attempts, their devices would wait for each other."""
    with pytest.raises(RanksFailed) as caught:
        run_ranks(call_another, 2, timeout=60)
    assert not [each for each in caught.value.reports if "did not exit" in each.state], str(caught.value)


def end_with_work_in_the_queue() -> str:
    accelerator = Accelerator()
    if accelerator.process_index == 1:
        time.sleep(3)
    numbers = torch.ones(2, device=accelerator.device)
    dist.all_reduce(numbers)
    host = torch.zeros(2)
    host.copy_(numbers, non_blocking=True)  # done when the device comes to it
    accelerator.end_training()
    return str(host.tolist())


def test_training_ends_when_the_device_has_finished() -> None:
    assert run_ranks(end_with_work_in_the_queue, 2, timeout=60) == ["[2.0, 2.0]"] * 2
