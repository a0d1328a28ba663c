"""Runs that look like failures and are none, which the Watch must leave alone; and failures that are hard to see."""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from side_by_side import side_by_side

from accel_core import Accelerator, InitProcessGroupKwargs, World
from accel_core.processes.watch.diagnosis import ENDED, Report
from accel_core.processes.watch.monitor import Watch
from accel_core.processes.watch.rank_status import Entry
from accel_core.processes.watch.stack_location import Process
from accel_core.processes.watch.status_store import StatusStore
from accel_testing import RanksFailed, run_ranks

LONG = 6.0  # seconds: the Watch sees within five that ranks do not come together

Launches = dict[Hashable, Future[list[Any]]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("attacks")


@pytest.fixture(scope="module")
def launches(folder: Path) -> Launches:
    return side_by_side(
        {
            **{how: partial(run_ranks, be_odd, 4, how) for how in ODD},
            train_in_a_thread: partial(run_ranks, train_in_a_thread, 2, folder),
            give_up: partial(run_ranks, give_up, 2),
            differ_beside_a_pair: partial(run_ranks, differ_beside_a_pair, 4),
        }
    )


class SlowBackward(torch.autograd.Function):
    """What comes before a model in the graph, and so after the model's last bucket in the backward."""

    @staticmethod
    def forward(ctx: object, value: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds  # type: ignore[attr-defined]
        return value.clone()

    @staticmethod
    def backward(ctx: object, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        time.sleep(ctx.seconds)  # type: ignore[attr-defined]
        return gradient, None


def broadcast_through_a_slow_rank(accelerator: Accelerator) -> None:
    """The first ranks go on; the last waits for the one in the middle of the tree, and that computes."""
    if accelerator.process_index == 2:
        time.sleep(LONG)
    dist.broadcast(torch.ones(4), 0)
    accelerator.gather(torch.ones(1))


def goes_on_computing_after_the_last_bucket(accelerator: Accelerator) -> None:
    model = accelerator.prepare(torch.nn.Linear(4, 1))
    rows = SlowBackward.apply(torch.ones(2, 4, requires_grad=True), LONG if accelerator.process_index == 1 else 0.0)
    accelerator.backward(model(rows).sum())
    accelerator.gather(torch.ones(1))


def two_threads_communicate(accelerator: Accelerator) -> None:
    """On each of two ranks one thread waits for the thread of the other one that computes."""
    rank, world = accelerator.process_index, World.current()
    pair = world.subgroup([0, 1])

    def beside() -> None:
        time.sleep(LONG if rank == 1 else 0.0)
        world.channel(pair).arrive("beside()")

    thread = threading.Thread(target=beside)
    if rank < 2:
        thread.start()
    time.sleep(LONG if rank == 0 else 0.0)
    accelerator.gather(torch.ones(1))
    if rank < 2:
        thread.join()


def fork_a_process_that_exits(accelerator: Accelerator) -> None:
    """A child of a rank runs what is registered for the exit of Python: it is not the rank that ends."""
    if accelerator.process_index == 1:
        child = os.fork()
        if child == 0:
            atexit._run_exitfuncs()
            os._exit(0)
        os.waitpid(child, 0)
        time.sleep(LONG)
    accelerator.gather(torch.ones(1))


ODD = [
    broadcast_through_a_slow_rank,
    goes_on_computing_after_the_last_bucket,
    two_threads_communicate,
    fork_a_process_that_exits,
]


def be_odd(how: Callable[[Accelerator], None]) -> str:
    how(Accelerator(cpu=True))
    return "fine"


@pytest.mark.parametrize("how", ODD)
def test_odd_runs_in_which_all_come_together_in_the_end_are_left_alone(
    launches: Launches, how: Callable[[Accelerator], None]
) -> None:
    assert launches[how].result() == ["fine"] * 4


def train_in_a_thread(folder: Path) -> None:
    """The main thread has ended long before the training has."""
    begun = threading.Event()

    def loop() -> None:
        accelerator = Accelerator(cpu=True)
        begun.set()  # its threads are there: from 3.12 on Python starts none when the main thread has ended
        if accelerator.process_index == 1:
            time.sleep(LONG)
        ranks = accelerator.gather(torch.tensor([accelerator.process_index])).tolist()
        (folder / str(accelerator.process_index)).write_text(str(ranks))

    threading.Thread(target=loop).start()
    begun.wait(60)


def test_training_in_a_thread_may_outlive_the_main_thread(launches: Launches, folder: Path) -> None:
    assert launches[train_in_a_thread].result() == [None] * 2
    assert [(folder / str(rank)).read_text() for rank in range(2)] == ["[0, 1]"] * 2


def differ_beside_a_pair() -> None:
    """Two ranks call different things in their group while two others use theirs."""
    accelerator = Accelerator(cpu=True)
    rank, world = accelerator.process_index, World.current()
    groups = [world.subgroup(ranks) for ranks in ([0, 1], [2, 3])]
    if rank == 2:
        world.channel(groups[1]).arrive("only_here()")
    accelerator.gather(torch.ones(1))


def test_rank_that_is_no_member_of_some_groups_ends_too(launches: Launches) -> None:
    with pytest.raises(RanksFailed) as caught:
        launches[differ_beside_a_pair].result()
    for report in caught.value.reports:
        assert "killed" not in report.state, str(report)
        assert "rank 2: in only_here() for" in report.traceback + report.output, str(report)


def give_up() -> tuple[float, str]:
    timeout = InitProcessGroupKwargs(timeout=timedelta(seconds=4))
    accelerator = Accelerator(cpu=True, kwargs_handlers=[timeout])
    started, text = time.monotonic(), ""
    if accelerator.is_main_process:
        with pytest.raises(RuntimeError) as caught:
            accelerator.gather(torch.ones(1))
        text = str(caught.value)
    waited = time.monotonic() - started
    while not accelerator.is_main_process and time.monotonic() < started + LONG:
        time.sleep(0.1)
    return waited, text


def test_timeout_of_the_group_comes_in_time_and_is_told_as_what_it_is(launches: Launches) -> None:
    waited, text = launches[give_up].result()[0]
    assert 4 <= waited < 10
    assert "Rank 0 gave up in gather(), after the timeout of its process group" in text
    assert "rank 1: at " in text
    assert "in give_up: time.sleep(0.1)" in text


def watch_of(store: dist.Store, told: list[str], rank: int = 0) -> Watch:
    """The Watch of one of two ranks, whose looks the test takes, and whose verdict goes to `told`."""
    watch = Watch(store, rank, 2, lambda: None, lambda: False, compare=False)
    watch._conclude = told.append  # type: ignore[method-assign]
    return watch


def other_in(store: dist.Store, rank: int = 1) -> StatusStore:
    return StatusStore(dist.PrefixStore("accel/watch/1", store), rank)


def look(watch: Watch, monkeypatch: pytest.MonkeyPatch, now: list[float]) -> None:
    now[0] += 1.0
    monkeypatch.setattr("accel_core.processes.watch.rank_status.time.monotonic", lambda: now[0])
    watch._look()


def test_rank_that_is_about_to_leave_a_collective_is_not_ended_by_those_who_left_it_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store, told, now = dist.HashStore(), [], [time.monotonic()]
    watch = watch_of(store, told)
    thread = threading.get_ident()
    watch.inside[thread] = Entry("wait_for_everyone()")
    for _ in range(4):
        look(watch, monkeypatch, now)
    other_in(store).post(Report(1, 7, "train.py, line 9", left=ENDED))  # it is through already
    look(watch, monkeypatch, now)
    assert told == []
    watch.inside[thread] = Entry("end_training()")
    look(watch, monkeypatch, now)
    assert told == []
    for _ in range(5):
        look(watch, monkeypatch, now)
    assert "rank 0 waits in end_training() for rank 1, in vain" in told[0]


def test_rank_that_has_made_no_world_yet_is_not_given_up_however_long_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    store, told, now = dist.HashStore(), [], [time.monotonic()]
    watch = watch_of(store, told)
    watch.inside[threading.get_ident()] = Entry("gather()")
    for _ in range(150):
        look(watch, monkeypatch, now)
    assert told == []


def test_store_that_is_lost_says_nothing_of_rank_0_while_its_process_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    now = [time.monotonic()]
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    other_in(store, 0).introduce(Process.current())
    client = store.clone()  # type: ignore[attr-defined]
    watch = watch_of(client, told, rank=1)
    watch.inside[threading.get_ident()] = Entry("gather()")
    del store
    for _ in range(6):
        look(watch, monkeypatch, now)
    assert watch._store_is_lost
    assert told == []


def test_later_world_finds_nothing_that_an_earlier_one_left_in_the_same_store() -> None:
    store = dist.HashStore()
    for _ in range(2):
        watch = Watch(store, 0, 2, lambda: None, lambda: False, compare=False).start()
        watch.fail(ValueError("of this world alone"))
        watch.leave(failed=False)
        watch.stop()
    boards = [StatusStore(dist.PrefixStore(f"accel/watch/{number}", store), 1) for number in (1, 2, 3)]
    assert [board.report(0) is not None for board in boards] == [True, True, False]
    assert [board.failures().count("of this world alone") for board in boards] == [1, 1, 0]


def test_rank_on_a_machine_that_nobody_can_look_at_is_given_up_after_two_minutes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store, told, now = dist.HashStore(), [], [time.monotonic()]
    watch = watch_of(store, told)
    other_in(store).introduce(Process("node-3", "elsewhere", 4711, "1"))
    watch.inside[threading.get_ident()] = Entry("gather()")
    for _ in range(115):
        look(watch, monkeypatch, now)
    assert told == []
    for _ in range(15):
        look(watch, monkeypatch, now)
    assert "rank 1: process 4711 on node-3 has not answered for 12" in told[0]
