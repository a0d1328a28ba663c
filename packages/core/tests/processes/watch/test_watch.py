"""One rank leaves, or the ranks call different collectives: all end within seconds, and say why.

Real ranks, real ends. `run_ranks` gives the others 15 s once a rank has failed; who then still runs is killed, and the test
sees that. Most of the time all of them wait for each other, so the launches run side by side.
"""

from __future__ import annotations

import os
import re
import signal
import sys
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

from accel_core import Accelerator, CollectiveMismatchError, InitProcessGroupKwargs, World, WorldError
from accel_core.processes.watch import monitor
from accel_core.processes.watch.monitor import Watch
from accel_core.processes.watch.status_store import StatusStore
from accel_testing import RanksFailed, live_objects, run_ranks
from accel_testing.ranks import RankReport

WITHIN = 15.0

pytestmark = pytest.mark.timeout(300)  # the first test waits for the launches of all


def raise_error() -> None:
    raise ValueError("sample 5 is rotten")


def leave_the_loop() -> None:
    raise StopIteration


def exit_quietly() -> None:
    sys.exit(0)


def vanish() -> None:
    os._exit(3)


def be_killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def be_stopped() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def raise_beside_a_stubborn_thread() -> None:
    threading.Thread(target=time.sleep, args=(30,)).start()
    raise ValueError("sample 5 is rotten")


def train(leave: Callable[[], None], culprit: int, call: str) -> None:
    """A loop that one rank leaves, in one way or another, while the others come to their next collective."""
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(torch.nn.Linear(4, 1))
    for step in range(5):
        if accelerator.process_index == culprit and step == 2:
            try:
                leave()
            except StopIteration:
                break
        if call == "backward":
            accelerator.backward(model(torch.ones(2, 4)).sum())
        elif call == "loss.backward":
            model(torch.ones(2, 4)).sum().backward()
        else:
            accelerator.gather(torch.ones(3))
    accelerator.end_training()


LEAVING: list[tuple[Callable[[], None], str]] = [
    (raise_error, "failed: ValueError: sample 5 is rotten"),
    (raise_beside_a_stubborn_thread, "failed: ValueError: sample 5 is rotten"),
    (leave_the_loop, "has ended its training, at "),
    (exit_quietly, "has ended its training, at "),
    (vanish, "ended without a word"),
    (be_killed, "ended without a word"),
    (be_stopped, "was stopped (SIGSTOP, or a debugger)"),
]


Launches = dict[Hashable, Future[list[Any]]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("watch")


@pytest.fixture(scope="module")
def launches(request: pytest.FixtureRequest, folder: Path) -> Launches:
    """What has become of every launch that is wanted, those that take longest first."""
    own = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    calls = [item.callspec.params for item in own]
    wanted = {(params["leave"], params["culprit"]) for params in calls if "leave" in params}
    run = partial(partial, run_ranks, timeout=90, grace=WITHIN)
    return side_by_side(
        {
            **{
                (leave, culprit): run(train, 3, leave, culprit, "backward")
                for leave in (raise_beside_a_stubborn_thread, be_stopped, *dict(LEAVING))
                for culprit in (0, 1)
                if (leave, culprit) in wanted
            },
            be_slow: run(be_slow, 3),
            be_suspended: run(be_suspended, 2, folder),
            be_stopped_after_a_late_start: run(be_stopped_after_a_late_start, 2),
            **{(exit_quietly, call): run(train, 2, exit_quietly, 1, call) for call in IN},
            hold_the_interpreter: run(hold_the_interpreter, 2),
            end_while_others_save: run(end_while_others_save, 2),
            **{(call_alone, call): run(call_alone, 3, call, folder / "weights") for call in ALONE},
            raw_barrier: run(raw_barrier, 2),
            adopted: run(adopted, 2),
            break_off_on_the_host: run(break_off_on_the_host, 3),
        }
    )


def reports_of(launch: Future[list[Any]]) -> list[RankReport]:
    with pytest.raises(RanksFailed) as caught:
        launch.result()
    return caught.value.reports


def said_by(report: RankReport) -> str:
    return report.traceback + report.output


@pytest.mark.parametrize("culprit", [pytest.param(0, marks=pytest.mark.full), 1])  # 0 hosts the store
@pytest.mark.parametrize(("leave", "reason"), LEAVING, ids=lambda value: getattr(value, "__name__", None))
def test_all_ranks_end_soon_when_one_leaves_and_say_which_and_why(
    launches: Launches, leave: Callable[[], None], reason: str, culprit: int
) -> None:
    for report in reports_of(launches[leave, culprit]):
        if report.rank != culprit:
            assert "killed" not in report.state, str(report)
            assert report.exit_code == 1
            assert reason in said_by(report), str(report)
            assert f"rank {culprit}" in said_by(report)


IN = ["loss.backward", "gather"]


@pytest.mark.parametrize("call", IN)
def test_rank_that_leaves_is_named_whatever_the_others_are_in(launches: Launches, call: str) -> None:
    for report in reports_of(launches[exit_quietly, call]):
        if report.rank == 0:
            assert "killed" not in report.state, str(report)
            assert "rank 1: has ended its training" in said_by(report), str(report)


def call_alone(call: str, folder: Path) -> None:
    """A collective under a condition that is true on one rank only, and then the loop."""
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(torch.nn.Linear(4, 1))
    accelerator.backward(model(torch.ones(2, 4)).sum())
    if accelerator.is_main_process:
        if call == "gather":
            accelerator.gather(torch.ones(2))  # only here
        elif call == "get_state_dict":
            accelerator.get_state_dict(model)  # only here
        elif call == "save_model":
            accelerator.save_model(model, folder)  # only here
        else:
            accelerator.wait_for_everyone()  # only here
    accelerator.backward(model(torch.ones(2, 4)).sum())


ALONE = ["gather", "get_state_dict", "save_model", "wait_for_everyone"]


@pytest.mark.parametrize("call", ALONE)
def test_collective_on_one_rank_only_ends_all_with_every_ranks_line(
    launches: Launches, folder: Path, call: str
) -> None:
    reports = reports_of(launches[call_alone, call])
    everything = "".join(map(said_by, reports))
    assert max(map(int, re.findall(r" for (\d+) s, at", everything))) <= 10
    for report in reports:
        assert "killed" not in report.state, str(report)
        assert report.exit_code == 1
    assert f"rank 0: in {call}() for" in everything
    assert f"accelerator.{call}(" in everything
    assert "# only here" in everything
    # DDP communicates in this forward: its buckets are arranged anew after the first backward.
    assert "rank 1: in the forward of DistributedDataParallel for" in everything, everything
    assert "in call_alone: accelerator.backward(model(torch.ones(2, 4)).sum())" in everything
    assert not (folder / "weights").exists(), "nothing is written before all are there"


def raw_barrier() -> None:
    accelerator = Accelerator(cpu=True)
    if accelerator.is_main_process:
        accelerator.gather(torch.ones(2))
    else:
        dist.all_reduce(torch.ones(1 << 16))


def test_collective_of_torch_itself_is_recognised_where_it_waits(launches: Launches) -> None:
    everything = "".join(map(said_by, reports_of(launches[raw_barrier])))
    assert "rank 1: in torch.distributed.all_reduce()" in everything or "The connections of rank" in everything
    assert "in raw_barrier: dist.all_reduce(torch.ones(1 << 16))" in everything


def be_slow() -> list[float]:
    """One rank computes for long while the others wait in a collective: that is no failure."""
    accelerator = Accelerator(cpu=True)
    if accelerator.process_index == 1:
        time.sleep(8)
    with accelerator.main_process_first():
        if accelerator.is_main_process:
            time.sleep(5)
    return accelerator.gather(torch.tensor([float(accelerator.process_index)])).tolist()  # type: ignore[no-any-return]


def test_ranks_may_wait_for_one_that_is_busy(launches: Launches) -> None:
    assert launches[be_slow].result() == [[0.0, 1.0, 2.0]] * 3


def hold_the_interpreter() -> list[float]:
    """As a library does that reads a large file in one call to C: no other thread of the process runs meanwhile."""
    accelerator = Accelerator(cpu=True)
    if accelerator.process_index == 1:
        until = time.monotonic() + 7
        before, _ = sys.getswitchinterval(), sys.setswitchinterval(1000)
        while time.monotonic() < until:
            pass
        sys.setswitchinterval(before)
    return accelerator.gather(torch.tensor([float(accelerator.process_index)])).tolist()  # type: ignore[no-any-return]


def test_rank_whose_threads_cannot_answer_is_seen_to_run_and_waited_for(launches: Launches) -> None:
    assert launches[hold_the_interpreter].result() == [[0.0, 1.0]] * 2


def be_suspended(folder: Path) -> list[float]:
    """A scheduler suspends the whole job, and resumes its ranks one after the other."""
    (folder / os.environ["RANK"]).write_text(str(os.getpid()))
    accelerator = Accelerator(cpu=True)
    rank = accelerator.process_index
    if rank == 1:
        time.sleep(1)
        child = os.fork()
        if child == 0:
            ranks = [int((folder / str(each)).read_text()) for each in range(2)]
            for pid in ranks:
                os.kill(pid, signal.SIGSTOP)
            time.sleep(8)
            for pid in ranks:
                os.kill(pid, signal.SIGCONT)
                time.sleep(1)
            os._exit(0)
        time.sleep(3)
        os.waitpid(child, 0)
    return accelerator.gather(torch.tensor([float(rank)])).tolist()  # type: ignore[no-any-return]


def test_job_that_was_suspended_as_a_whole_goes_on(launches: Launches) -> None:
    assert launches[be_suspended].result() == [[0.0, 1.0]] * 2


def be_stopped_after_a_late_start() -> None:
    """Rank 0, which hosts the store, stands still before it announces its process, and later for good."""
    monitor.MEETING, introduce = timedelta(seconds=0.2), StatusStore.introduce
    if os.environ["RANK"] == "0":
        StatusStore.introduce = lambda *those: (time.sleep(2), introduce(*those))[1]  # type: ignore[method-assign]
    accelerator = Accelerator(cpu=True)
    accelerator.wait_for_everyone()
    time.sleep(3)
    if accelerator.process_index == 0:
        be_stopped()
    accelerator.wait_for_everyone()


def test_host_of_the_store_that_was_late_is_seen_to_be_stopped(launches: Launches) -> None:
    _, report = reports_of(launches[be_stopped_after_a_late_start])
    assert report.exit_code == 1, str(report)
    assert "was stopped (SIGSTOP, or a debugger)" in said_by(report)


def mismatch(kind: str) -> str:
    accelerator = Accelerator(cpu=True)
    main = accelerator.is_main_process
    started = time.monotonic()
    with pytest.raises(CollectiveMismatchError) as caught:
        if kind == "op" and main:
            accelerator.wait_for_everyone()
        elif kind == "op":
            accelerator.gather(torch.ones(2))
        elif kind == "shape":
            accelerator.reduce(torch.ones(2) if main else torch.ones(3))
        else:
            accelerator.reduce(torch.ones(2) if main else torch.ones(2, dtype=torch.int64))
    assert time.monotonic() - started < 5
    return str(caught.value)


@pytest.mark.parametrize(
    ("kind", "facts"),
    [
        ("op", ["rank 0: wait_for_everyone()", "rank 1, 2: gather", "in mismatch: accelerator.gather(torch.ones(2))"]),
        ("shape", ["float32[2]", "float32[3]", "in mismatch: accelerator.reduce("]),
        ("dtype", ["float32[2]", "int64[2]", "in mismatch: accelerator.reduce("]),
    ],
)
def test_checks_name_op_shape_dtype_and_line_of_each_rank(kind: str, facts: list[str]) -> None:
    for text in run_ranks(mismatch, 3, kind, env={"ACCELERATE_DEBUG_MODE": "1"}):
        for fact in facts:
            assert fact in text


def compare_many() -> int:
    accelerator = Accelerator(cpu=True)
    assert accelerator.state.debug
    for step in range(20):
        accelerator.gather(torch.ones(step + 1))
        accelerator.wait_for_everyone()
    lines = (lambda: accelerator.gather(torch.ones(1)),
             lambda: accelerator.gather(torch.ones(1)))  # fmt: skip
    with pytest.warns(UserWarning, match="called gather.* at different lines") as caught:
        lines[accelerator.process_index]()
    assert caught[0].filename == __file__
    store = dist.distributed_c10d._get_default_store()
    return int(store.num_keys())


def test_checks_leave_nothing_behind_and_warn_of_different_lines() -> None:
    assert max(run_ranks(compare_many, 2, env={"ACCELERATE_DEBUG_MODE": "1"})) < 60


def watches_after_the_end() -> tuple[int, list[str]]:
    for _ in range(3):
        accelerator = Accelerator(cpu=True)
        accelerator.gather(torch.ones(1))
        accelerator.end_training()
    del accelerator
    names = [thread.name for thread in threading.enumerate() if "watch" in thread.name]
    return len(live_objects(Watch)), names


def test_watch_ends_with_its_world() -> None:
    assert run_ranks(watches_after_the_end, 2) == [(0, [])] * 2


def break_off_on_the_host() -> tuple[int, bool]:
    """Rank 0 is last to have made the group, so the others have connected to the store, which it hosts, meanwhile."""
    if os.environ["RANK"] == "0":
        make = dist.init_process_group

        def make_slowly(*args: object, **options: object) -> None:
            make(*args, **options)  # type: ignore[arg-type]
            time.sleep(2)

        dist.init_process_group = make_slowly
    world = World.current(cpu=True)
    world.barrier()
    assert world._connections is not None
    assert world.watch is not None
    if world.is_main:
        world._connections.break_off([])
    with pytest.raises(RuntimeError, match="Connection (closed|reset) by peer"):
        dist.barrier()
    return world.watch._board.ask(False)


def test_breaking_the_groups_leaves_the_store_to_those_who_ask_why(launches: Launches) -> None:
    assert launches[break_off_on_the_host].result() == [(0, False)] * 3


def adopted() -> None:
    dist.init_process_group("gloo")
    accelerator = Accelerator(cpu=True)
    if accelerator.is_main_process:
        accelerator.gather(torch.ones(2))
    else:
        dist.barrier()


def test_group_that_somebody_else_started_is_watched_too(launches: Launches) -> None:
    for report in reports_of(launches[adopted]):
        assert "killed" not in report.state, str(report)
        assert "gather()" in said_by(report), str(report)


def end_while_others_save() -> str:
    """The main process still has work to do that is nobody else's."""
    accelerator = Accelerator(cpu=True, kwargs_handlers=[InitProcessGroupKwargs()])
    accelerator.gather(torch.ones(1))
    if accelerator.is_main_process:
        time.sleep(7)
    try:
        accelerator.end_training()
    except WorldError as error:
        return str(error)
    return "fine"


def test_ranks_may_end_at_different_times(launches: Launches) -> None:
    assert launches[end_while_others_save].result() == ["fine"] * 2
