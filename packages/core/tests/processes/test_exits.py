"""Processes that have trained together end cleanly, however they end: no abort, no hang, the exit code of the script."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from accel_core import Accelerator
from accel_core.processes.world import World
from accel_testing import RanksFailed, run_ranks

SOAK = bool(os.environ.get("ACCEL_SOAK"))
PAIRS = 100 if SOAK else 2
LAUNCHES = 20 if SOAK else 1

SCRIPT = """
import copy, sys, torch
from accel_core import Accelerator

accelerator = Accelerator(cpu=True)
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 1))
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.01))
for _ in range(2):
    accelerator.backward(model(torch.ones(8, 64)).mean())
    optimizer.step()
    optimizer.zero_grad()
twin = copy.deepcopy(model)
twin(torch.ones(8, 64)).mean().backward()
assert isinstance(model, torch.nn.parallel.DistributedDataParallel)
if accelerator.process_index in map(int, sys.argv[1:]):
    raise ValueError("only I")
"""


@contextmanager
def started(script: Path, *arguments: str) -> Iterator[list[subprocess.Popen[str]]]:
    """Two interpreters that run `script` as ranks 0 and 1; killed if they still run at the end."""
    with socket.socket() as holder:  # bound, not listening: the port stays free for torch's store, and only for it
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        environment = {
            **os.environ,
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(holder.getsockname()[1]),
            "OMP_NUM_THREADS": "1",
        }
        processes = [
            subprocess.Popen(
                [sys.executable, str(script), *arguments],
                env={**environment, "RANK": rank, "LOCAL_RANK": rank},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in ("0", "1")
        ]
        try:
            yield processes
        finally:
            for process in processes:
                process.kill()
                process.communicate()


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def finish(processes: list[subprocess.Popen[str]]) -> list[tuple[int, str]]:
    """The exit code and last words of each."""
    words = [process.communicate(timeout=90)[1] for process in processes]
    return [(process.returncode, said) for process, said in zip(processes, words, strict=True)]


@pytest.mark.timeout(60 + 15 * PAIRS)
@pytest.mark.full
def test_interpreters_with_a_live_wrapper_exit_with_zero(script: Path) -> None:
    """The wrapper and a copy of it are still globals of the main module, which is finalized after the exit callbacks.

    Real interpreters, although each costs 3 s: where the script destroyed the group under a live wrapper, 1 of 20 pairs of
    these aborted, and none of 180 pairs forked from a process that had imported torch.
    """
    for _ in range(PAIRS // 2):  # two pairs overlap: one computes while the other waits
        with started(script) as one, started(script) as other:
            assert [code for code, _ in finish(one) + finish(other)] == [0] * 4


def test_rank_that_fails_does_not_keep_the_others_waiting(script: Path) -> None:
    """It exits with its traceback and at once; the other one has nothing left to do, waits for a while, and leaves."""
    with started(script, "1") as processes:
        (first, said), (second, error) = finish(processes)
    assert second == 1
    assert "ValueError: only I" in error
    assert first == 0
    assert "ends without the others" in said


def work_until_the_peer_is_gone() -> None:
    world = World.current(cpu=True)
    if world.rank == 1:
        raise ValueError("only I")
    while True:
        dist.all_reduce(torch.ones(1))


def test_work_with_a_rank_that_failed_fails_fast() -> None:
    """Rank 0 ends by itself: it is not killed when the pool's patience with it is over."""
    with pytest.raises(RanksFailed) as caught:
        run_ranks(work_until_the_peer_is_gone, 2)
    first, second = caught.value.reports
    assert "RuntimeError" in first.traceback
    assert "only I" in second.traceback
    assert (first.exit_code, second.exit_code) == (1, 1)


kept: list[object] = []


def train(ending: str) -> None:
    if ending == "adopted":
        dist.init_process_group("gloo")
    accelerator = Accelerator(cpu=True)
    bare = torch.nn.Linear(8, 1)
    model, optimizer = accelerator.prepare(bare, torch.optim.SGD(bare.parameters(), 0.01))
    accelerator.backward(model(torch.ones(2, 8)).mean())
    optimizer.step()
    kept.extend([accelerator, model, optimizer])
    if ending == "destroyed by the script":
        dist.destroy_process_group()
    elif ending == "end_training":
        accelerator.end_training()
    elif ending == "one is late" and accelerator.process_index == 1:
        time.sleep(1)


@pytest.mark.parametrize("ending", ["just ends", "destroyed by the script", "end_training", "adopted", "one is late"])
def test_every_way_to_end_is_clean(ending: str) -> None:
    """The rank pool leaves through the interpreter's finalization and reports exit codes and aborts."""
    for _ in range(LAUNCHES):
        run_ranks(train, 2, ending)
