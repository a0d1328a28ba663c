"""The rank pool: fresh processes that get a launcher's environment, report everything and leave nothing behind."""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from accel_testing import RanksFailed, run_ranks


def identity(value: object) -> tuple[int, object]:
    return int(os.environ["RANK"]), value


def summed() -> float:
    dist.init_process_group("gloo")
    tensor = torch.ones(1) * dist.get_rank()
    dist.all_reduce(tensor)
    dist.destroy_process_group()
    return tensor.item()


def rank_one_raises() -> None:
    if os.environ["RANK"] == "1":
        raise ValueError("only I")


def rank_one_raises_while_the_other_sleeps() -> None:
    rank_one_raises()
    stuck()


def stuck() -> None:
    time.sleep(1000)


def stuck_in_c() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        dist.barrier()
    threading.Event().wait()


def stuck_with_a_worker(path: str) -> None:
    worker = os.fork()
    if worker == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(1000)
    Path(path).write_text(str(worker))
    stuck()


def abort_at_exit() -> str:
    atexit.register(os.abort)
    return "fine"


def vanish() -> None:
    os._exit(7)


def write_at_exit(path: str) -> None:
    atexit.register(Path(path + os.environ["RANK"]).write_text, "left")


def environment(*names: str) -> dict[str, str | None]:
    return {name: os.environ.get(name) for name in names}


def threads() -> tuple[int, int]:
    return torch.get_num_threads(), threading.active_count()


def big() -> torch.Tensor:
    return torch.arange(4_000_000)


def unpicklable() -> object:
    return threading.Lock()


def speak() -> None:
    print("said by rank", os.environ["RANK"], flush=True)
    print("complained", file=sys.stderr)


def drawn() -> float:
    return torch.rand(()).item()


def test_ranks_draw_unlike_numbers_and_every_run_draws_the_same() -> None:
    first, second = run_ranks(drawn, 2)
    assert first != second
    assert run_ranks(drawn, 2) == [first, second]


def test_results_come_in_rank_order_and_arguments_travel() -> None:
    assert run_ranks(identity, 3, {"a": 1}) == [(0, {"a": 1}), (1, {"a": 1}), (2, {"a": 1})]
    assert run_ranks(identity, 1, value="by name") == [(0, "by name")]


def test_ranks_can_form_a_process_group() -> None:
    assert run_ranks(summed, 2) == [1.0, 1.0]


def test_ranks_see_what_torchrun_would_set() -> None:
    first, second = run_ranks(environment, 2, "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
    assert first == {
        "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
    }  # fmt: skip
    assert second["RANK"] == second["LOCAL_RANK"] == "1"


def test_environment_follows_the_test_and_its_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OF_THE_TEST", "yes")
    env = {"ADDED": "x", "LOCAL_RANK": None}
    (seen,) = run_ranks(environment, 1, "OF_THE_TEST", "ADDED", "LOCAL_RANK", env=env)
    assert seen == {"OF_THE_TEST": "yes", "ADDED": "x", "LOCAL_RANK": None}


def test_devices_are_hidden_unless_they_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of AMD's an empty list hides none."""
    names = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
    monkeypatch.setenv(names[0], "3")
    monkeypatch.delenv(names[1], raising=False)
    assert run_ranks(environment, 1, *names) == [dict.fromkeys(names, "-1")]
    assert run_ranks(environment, 1, *names, devices=True) == [{names[0]: "3", names[1]: None}]
    assert run_ranks(environment, 1, *names, env={names[0]: "4"}) == [{names[0]: "4", names[1]: "-1"}]


def test_each_rank_computes_on_one_thread() -> None:
    assert run_ranks(threads, 2) == [(1, 1), (1, 1)]


def test_big_results_come_back_whole() -> None:
    for result in run_ranks(big, 2):
        assert torch.equal(result, torch.arange(4_000_000))


def test_traceback_of_a_raising_rank_is_reported_whole() -> None:
    with pytest.raises(RanksFailed) as caught:
        run_ranks(rank_one_raises, 2)
    first, second = caught.value.reports
    assert (first.failed, first.state) == (False, "returned")
    assert second.failed
    assert second.state == "raised: ValueError: only I"
    assert 'raise ValueError("only I")' in str(caught.value)
    assert "rank_one_raises on 2 ranks: 1 failed (rank 1)" in str(caught.value)


def test_result_that_cannot_be_pickled_is_an_error_of_its_rank() -> None:
    with pytest.raises(RanksFailed, match="cannot pickle"):
        run_ranks(unpicklable, 1)


@pytest.mark.full(group="suites")
def test_stuck_ranks_are_killed_and_their_stacks_shown() -> None:
    started = time.monotonic()
    with pytest.raises(RanksFailed) as caught:
        run_ranks(stuck, 2, timeout=2.0)
    assert time.monotonic() - started < 20
    for report in caught.value.reports:
        assert "did not end: killed 2 s after the start" in report.state
        assert "in stuck" in report.stacks


@pytest.mark.full(group="suites")
def test_other_ranks_have_a_short_grace_when_one_has_failed() -> None:
    with pytest.raises(RanksFailed) as caught:
        run_ranks(rank_one_raises_while_the_other_sleeps, 2)
    first, second = caught.value.reports
    assert first.state == "did not end: killed 5 s after another rank failed"
    assert second.state == "raised: ValueError: only I"


@pytest.mark.full(group="suites")
def test_rank_that_ignores_sigterm_inside_a_collective_is_killed_too() -> None:
    with pytest.raises(RanksFailed) as caught:
        run_ranks(stuck_in_c, 2, timeout=3.0)
    assert "barrier" in caught.value.reports[0].stacks
    assert caught.value.reports[1].exit_code == -signal.SIGKILL


@pytest.mark.full(group="suites")
def test_workers_of_a_stuck_rank_are_ended_with_it_and_keep_nobody_waiting(tmp_path: Path) -> None:
    started = time.monotonic()
    with pytest.raises(RanksFailed, match="did not end: killed 3 s after the start"):
        run_ranks(stuck_with_a_worker, 1, str(tmp_path / "worker"), timeout=3)
    assert time.monotonic() - started < 20
    worker = Path("/proc") / (tmp_path / "worker").read_text()
    while worker.exists() and time.monotonic() - started < 20:
        time.sleep(0.05)  # it was killed, and takes a moment to be gone
    assert not worker.exists()


def test_exit_callbacks_run(tmp_path: Path) -> None:
    run_ranks(write_at_exit, 2, str(tmp_path / "rank"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rank0", "rank1"]


def test_abort_at_exit_is_a_failure_although_the_function_returned() -> None:
    with pytest.raises(RanksFailed, match="returned, and then failed while exiting: ended by SIGABRT"):
        run_ranks(abort_at_exit, 1)


def test_rank_that_vanishes_is_a_failure() -> None:
    with pytest.raises(RanksFailed, match="ended without returning: exit code 7"):
        run_ranks(vanish, 2)


def test_output_of_ranks_is_passed_on(capfd: pytest.CaptureFixture[str]) -> None:
    run_ranks(speak, 2)
    out, _ = capfd.readouterr()
    assert out.splitlines() == ["said by rank 0", "complained", "said by rank 1", "complained"]


@pytest.mark.full(group="suites")
def test_ranks_start_and_end_in_less_time_than_an_import_of_torch_takes() -> None:
    """The best of three: what is bounded is what the pool costs, and not what else the machine does."""
    assert min(seconds(lambda: run_ranks(identity, 2, None)) for _ in range(3)) < seconds(
        lambda: subprocess.run([sys.executable, "-c", "import torch"], check=True)
    )


def seconds(call: Callable[[], object]) -> float:
    started = time.monotonic()
    call()
    return time.monotonic() - started
