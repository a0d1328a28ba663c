"""A rank that fails alone is named on every other rank, with its error; and nobody is blamed for what was handled."""

from __future__ import annotations

import contextlib
import os
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

from accel_core import Accelerator
from accel_core.processes.failure_output import broken_connection_in, is_broken_connection
from accel_core.processes.watch import collective_scope
from accel_core.processes.watch.collective_scope import explain
from accel_core.processes.watch.status_store import StatusStore
from accel_testing import RanksFailed, run_ranks
from accel_testing.ranks import RankReport

BROKEN = "[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:7069."


class Rotten(Dataset[torch.Tensor]):
    """Samples that can be read on all ranks but one."""

    def __init__(self, bad: bool) -> None:
        self.bad = bad

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.bad and index == 5:
            raise ValueError(f"sample {index} is rotten")
        return torch.full((4,), float(index))


def train(where: str, failing: int, workers: int = 0) -> None:
    """One loop in which the loader of one rank raises, so that the others come to a collective alone."""
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)))
    batches = iter(DataLoader(Rotten(accelerator.process_index == failing), batch_size=2, num_workers=workers))
    for _ in range(4):
        batch = next(batches)
        if where == "backward":
            accelerator.backward(model(batch).sum())
        elif where == "loss.backward":
            model(batch).sum().backward()
        elif where == "forward_backward":
            accelerator.forward_backward(model, [batch], lambda output, batch: (output.sum(), len(batch)))
        elif where == "gather":
            accelerator.gather(batch)
        elif where == "large reduce":
            accelerator.reduce(torch.ones(1 << 20))
        elif where == "prepare":
            accelerator.prepare(torch.nn.Linear(2, 2))
        else:
            accelerator.wait_for_everyone()


def reports_of(function: object, size: int, *args: object) -> list[RankReport]:
    started = time.monotonic()
    with pytest.raises(RanksFailed) as caught:
        run_ranks(function, size, *args)  # type: ignore[arg-type]
    assert time.monotonic() - started < 15 + 5
    return caught.value.reports


@pytest.mark.parametrize(
    ("where", "failing"),
    [
        ("backward", 0),
        ("backward", 1),
        ("forward_backward", 0),
        ("gather", 0),
        ("gather", 2),
        ("large reduce", 1),
        ("wait_for_everyone", 0),
        ("wait_for_everyone", 1),
        ("prepare", 0),
    ],
)
def test_error_of_one_rank_is_told_in_the_exceptions_of_all_others(where: str, failing: int) -> None:
    for report in reports_of(train, 3, where, failing):
        assert report.exit_code == 1, str(report)
        if report.rank == failing:
            assert "ValueError: sample 5 is rotten" in report.traceback
            assert "Connection" not in report.traceback
        else:
            assert "Connection" in report.traceback
            assert f"because rank {failing} failed: ValueError: sample 5 is rotten" in report.traceback, str(report)
            assert "Mend that one" in report.traceback


def test_error_in_a_worker_is_told_with_its_original_traceback() -> None:
    first, second = reports_of(train, 2, "backward", 1, 1)
    assert "rank 1 failed: ValueError: Caught ValueError in DataLoader worker process 0" in first.traceback
    assert "sample 5 is rotten" in first.traceback
    assert "in __getitem__" in second.traceback


@pytest.mark.parametrize("failing", [0, 1])
def test_error_that_surfaces_outside_of_our_calls_is_explained_at_exit(failing: int) -> None:
    for report in reports_of(train, 3, "loss.backward", failing):
        if report.rank != failing:
            assert "rank" not in report.state
            assert f"rank {failing} failed: ValueError: sample 5 is rotten" in report.output, str(report)


def leave_in_peace(failing: int) -> None:
    """As scripts do that log an error by themselves and exit: the interpreter hears of none."""
    with contextlib.suppress(ValueError):
        train("gather", failing)


def test_rank_that_caught_its_error_and_left_is_said_to_have_ended() -> None:
    first, second, third = reports_of(leave_in_peace, 3, 1)
    assert second.state == "returned"
    for report in (first, third):
        assert "rank 1: has ended its training, at " in report.traceback, str(report)


def vanish() -> None:
    accelerator = Accelerator(cpu=True)
    if accelerator.process_index == 1:
        os._exit(7)
    accelerator.wait_for_everyone()


def test_rank_that_vanishes_without_a_word_is_named_by_what_is_known_of_its_process() -> None:
    first, second = reports_of(vanish, 2)
    assert second.exit_code == 7
    assert "Connection" in first.traceback
    assert "The connections of rank 0 broke in wait_for_everyone(). The ranks:" in first.traceback
    assert "ended without a word: killed from outside (out of memory?), os._exit(), or a crash" in first.traceback


def stores() -> list[StatusStore]:
    store = dist.HashStore()
    return [StatusStore(store, rank) for rank in range(3)]


def test_notices_of_all_others_are_read_and_own_ones_never() -> None:
    first, second, third = stores()
    assert first.failures() == ""
    third.post_failure(OSError("disk gone"))
    assert "rank 2 failed: OSError: disk gone" in first.failures()
    assert third.failures() == ""
    second.post_failure(ValueError("really"))
    assert "because rank 1 failed: ValueError: really; rank 2 failed: OSError: disk gone" in first.failures()


def test_long_errors_travel_by_their_end_and_name_the_line_that_raised() -> None:
    first, second, _ = stores()
    try:
        raise ValueError("x" * 10_000 + " the point")
    except ValueError as error:
        second.post_failure(error)
    told = first.failures()
    assert "the point" in told
    assert "test_failure_notices.py" in told
    assert len(told) < 5000


def test_only_broken_connections_are_explained() -> None:
    assert is_broken_connection(RuntimeError(BROKEN))
    assert is_broken_connection(dist.DistBackendError("NCCL error"))
    assert not is_broken_connection(RuntimeError("shapes do not match"))
    assert not is_broken_connection(ValueError(BROKEN))
    error = RuntimeError("shapes do not match")
    explain(error)
    assert str(error) == "shapes do not match"


def test_broken_connection_is_found_behind_an_error_of_the_user() -> None:
    lost = RuntimeError(BROKEN)
    try:
        try:
            raise lost
        except RuntimeError as error:
            raise KeyError("my own") from error
    except KeyError as error:
        assert broken_connection_in(error) is lost
    assert broken_connection_in(KeyError("alone")) is None


def test_explaining_does_nothing_without_a_process_group() -> None:
    error = RuntimeError(BROKEN)
    explain(error)
    assert str(error) == BROKEN


def test_error_of_a_device_after_a_verdict_is_explained_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a backend says of a collective that was broken off."""
    watch: Any = SimpleNamespace(verdict="", explain=lambda error: watch.verdict)
    monkeypatch.setattr(collective_scope, "running", lambda: watch)
    before, error = RuntimeError("a kernel failed"), RuntimeError("the communicator was aborted")
    collective_scope.explain(before)
    assert str(before) == "a kernel failed"
    watch.verdict = "rank 0 waits in vain for rank 1"
    collective_scope.explain(error)
    assert str(error) == "the communicator was aborted\nrank 0 waits in vain for rank 1"
    other = ValueError("of the user")
    collective_scope.explain(other)
    assert str(other) == "of the user"
