"""A script needs no arguments under any launcher: processes of their own, with the environment that each launcher gives.

None of these launchers is needed here but torchrun: what they leave in the environment is all that tells a process its place.
So most of these processes are forked from the server of `run_ranks`, for an interpreter that imports torch takes seconds.
"""

from __future__ import annotations

import io
import itertools
import json
import os
import re
import runpy
import socket
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from accel_testing import RankReport, RanksFailed, run_ranks

Environment = dict[str, str]
LIMIT = 100.0  # seconds; a process that runs longer is killed
FOREIGN = re.compile(
    r"(RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|MASTER_.*|ACCEL.*|TORCHELASTIC.*|(SLURM|OMPI|PMI|PMIX|MPI|MV2)_.*)"
)

SCRIPT = """
import json, os, torch
from accel_core import Accelerator, World

accelerator = Accelerator(cpu=True)
torch.manual_seed(0)
model = torch.nn.Linear(3, 1)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
for step in range(2):
    accelerator.backward(model(torch.full((4, 3), float(accelerator.process_index))).pow(2).mean())
    optimizer.step()
    optimizer.zero_grad()
world = World.current()
line = json.dumps({
    "source": world.source,
    "place": [world.rank, world.size, world.local_rank, world.local_size],
    "ranks": accelerator.gather(torch.tensor([world.rank])).tolist(),
    "weights": len(set(accelerator.gather(accelerator.unwrap_model(model).bias).tolist())),
})
os.write(1, f"{line}\\n".encode())  # whole, for torchrun gives all ranks one pipe
"""

REFUSABLE = """
try:
    accelerator = Accelerator(cpu=True)
except Exception:
    refused.touch()
    raise
"""

jobs = itertools.count(os.getpid() % 10000 * 100)


def nodes(sizes: list[int]) -> Iterator[tuple[int, int, int, int]]:
    """Rank, node, local rank and local size of every process on nodes with so many of them."""
    places = ((node, local, size) for node, size in enumerate(sizes) for local in range(size))
    return ((rank, *place) for rank, place in enumerate(places))


def slurm(*sizes: int) -> list[Environment]:
    """What `srun` gives its tasks, on nodes that all are this machine."""
    job, total = str(next(jobs)), str(sum(sizes))
    shared = {
        "SLURM_JOB_ID": job,
        "SLURM_STEP_ID": "0",
        "SLURM_NTASKS": total,
        "SLURM_STEP_NUM_TASKS": total,
        "SLURM_STEP_TASKS_PER_NODE": ",".join(map(str, sizes)),
        "SLURM_STEP_NODELIST": ",".join(f"127.0.0.{number + 1}" for number in range(len(sizes))),
    }
    return [
        {**shared, "SLURM_PROCID": str(rank), "SLURM_NODEID": str(node), "SLURM_LOCALID": str(local)}
        for rank, node, local, _ in nodes(list(sizes))
    ]


def open_mpi(*sizes: int, prefix: str = "OMPI", **more: str) -> list[Environment]:
    more = more or {"PMIX_NAMESPACE": f"prterun-host-{next(jobs)}@1"}
    return [
        {
            **more,
            f"{prefix}_COMM_WORLD_RANK": str(rank),
            f"{prefix}_COMM_WORLD_SIZE": str(sum(sizes)),
            f"{prefix}_COMM_WORLD_LOCAL_RANK": str(local),
            f"{prefix}_COMM_WORLD_LOCAL_SIZE": str(size),
        }
        for rank, _, local, size in nodes(list(sizes))
    ]


def mvapich(*sizes: int) -> list[Environment]:
    return open_mpi(*sizes, prefix="MV2", PBS_JOBID=f"{next(jobs)}.server")


def hydra(*sizes: int) -> list[Environment]:
    """What the mpiexec of MPICH and Intel MPI gives, inside an allocation of Slurm."""
    names = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
    job = str(next(jobs))
    return [
        {"SLURM_JOB_ID": job, **dict(zip(names, map(str, (rank, sum(sizes), local, size)), strict=True))}
        for rank, _, local, size in nodes(list(sizes))
    ]


def by_hand(*sizes: int, port: int) -> list[Environment]:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return [
        {**meeting, **dict(zip(names, map(str, (rank, sum(sizes), local, size)), strict=True))}
        for rank, _, local, size in nodes(list(sizes))
    ]


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


@pytest.fixture
def port() -> Iterator[int]:
    with socket.socket() as holder:  # bound, not listening: the port stays free for torch's store, and only for it
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


def environment_with(more: Environment) -> Environment:
    """The environment of a process that is started with `more`, and has nothing of another launcher's."""
    own = {name: value for name, value in os.environ.items() if not FOREIGN.fullmatch(name)}
    return {**own, **more, "OMP_NUM_THREADS": "1"}


@contextmanager
def started(command: list[str], more: Environment) -> Iterator[subprocess.Popen[str]]:
    """An interpreter with this environment; killed if it still runs at the end."""
    process = subprocess.Popen(
        [sys.executable, "-W", "error", *command],
        env=environment_with(more),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def finished(command: list[str], more: Environment) -> list[dict[str, Any]]:
    """What an interpreter, or the processes that it starts, say of their worlds, by rank, if it ends well and without a warning."""
    with started(command, more) as process:
        output, errors = process.communicate(timeout=LIMIT)
    assert process.returncode == 0, errors
    return sorted(read(output), key=lambda world: world["place"])


def read(output: str) -> list[dict[str, Any]]:
    """A line of each process; gloo of torch 2.9 prints beside them how many it has connected."""
    return [json.loads(line) for line in output.splitlines() if not line.startswith("[Gloo] ")]


kept: list[dict[str, Any]] = []


def forked(script: str, environments: list[Environment]) -> None:
    """Is the script, in the environment of its number; its globals are there until the end of the process."""
    complete = environment_with(environments[int(os.environ["RANK"])])
    os.environ.clear()
    os.environ.update(complete)
    warnings.simplefilter("error")
    kept.append(runpy.run_path(script, run_name="__main__"))


def worlds(script: Path, *environments: Environment) -> list[dict[str, Any]]:
    """What each process says of its world, if all of them end well and say nothing else."""
    with redirect_stdout(io.StringIO()) as said:
        run_ranks(forked, len(environments), str(script), list(environments), timeout=LIMIT)
    return read(said.getvalue())


def failed(script: Path, *environments: Environment) -> list[RankReport]:
    """How each process ended, of which one at least has failed; 5 s later the others are killed."""
    with pytest.raises(RanksFailed) as caught:
        run_ranks(forked, len(environments), str(script), list(environments), timeout=LIMIT)
    return caught.value.reports


def expected(source: str, *sizes: int) -> list[dict[str, Any]]:
    total = sum(sizes)
    return [
        {"source": source, "place": [rank, total, local, size], "ranks": list(range(total)), "weights": 1}
        for rank, _, local, size in nodes(list(sizes))
    ]


def test_jobs_of_all_launchers_start_at_once_on_one_host_and_train(script: Path) -> None:
    """No arguments, and no port given: each job finds its own."""
    found = worlds(script, *slurm(2), *open_mpi(2), *hydra(2), *mvapich(2))
    assert found == [*expected("slurm", 2), *(expected("mpi", 2) * 3)]


@pytest.mark.soak
def test_twenty_jobs_at_once_all_start(script: Path) -> None:
    """With job numbers that follow one another, as a queue gives them."""
    found = worlds(script, *itertools.chain.from_iterable(slurm(2) for _ in range(20)))
    assert found == expected("slurm", 2) * 20


def test_tasks_of_slurm_on_two_nodes_meet_at_the_first(script: Path) -> None:
    assert worlds(script, *slurm(2, 1)) == expected("slurm", 2, 1)


def test_ranks_given_by_hand_train_also_beside_the_same_words_of_a_launcher(script: Path, port: int) -> None:
    hand = by_hand(1, 2, port=port)
    ranks = [{**one, **other} for one, other in zip(open_mpi(1, 2), hand, strict=True)]
    found = worlds(script, *slurm(1), *ranks)
    assert found == [*expected("slurm", 1), *expected("mpi", 1, 2)]


def test_ranks_given_by_hand_are_a_world(script: Path, port: int) -> None:
    assert worlds(script, *by_hand(2, port=port)) == expected("torchrun", 2)


@pytest.mark.full
def test_torchrun_in_an_allocation_of_slurm_starts_what_it_was_asked_for(script: Path) -> None:
    allocation, task = slurm(1)[0], {"SLURM_NTASKS": "8", "SLURM_TASKS_PER_NODE": "8"}
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    assert finished(command, {**allocation, **task}) == expected("torchrun", 2)


def test_process_in_an_allocation_without_srun_is_alone(script: Path) -> None:
    batch = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "8"}
    assert finished([str(script)], batch) == expected("alone", 1)


def test_rank_that_contradicts_its_launcher_ends_at_once(script: Path) -> None:
    """It must not become a world of one."""
    (report,) = failed(script, {**slurm(2)[1], "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"})
    assert report.exit_code == 1
    assert "The place of this process is told twice, and differently" in report.traceback


def test_two_nodes_that_claim_one_rank_are_an_error_at_once(script: Path) -> None:
    """Long before the timeout, which is half an hour; `failed` waits for a fraction of that."""
    first, second = slurm(1, 1)
    noted = script.with_name("refused")
    script.write_text(
        f"import pathlib, time\nrefused = pathlib.Path({str(noted)!r})\n"
        + SCRIPT.replace("accelerator = Accelerator(cpu=True)", REFUSABLE)
        + "while not refused.exists(): time.sleep(0.1)"  # or the job may be over, and the store gone, before the third has come
    )
    reports = failed(script, first, second, second)
    text = "".join(report.traceback for report in reports[1:])
    assert "another process has claimed rank 1 at tcp://127.0.0.1:" in text


@pytest.fixture
def hurried(script: Path) -> Path:
    """The same script, with little patience."""
    patience = "from datetime import timedelta\nWorld.current(cpu=True, timeout=timedelta(seconds=4))\naccelerator = "
    script.write_text(SCRIPT.replace("accelerator = ", patience, 1))
    return script


def test_fewer_processes_than_announced_say_who_is_missing(hurried: Path) -> None:
    first, second, _, _ = slurm(4)
    for report in failed(hurried, first, second):
        assert report.exit_code == 1
        assert "2 of 4 came within 0:00:04, and these ranks are missing: 2, 3" in report.traceback


def test_process_that_inherits_the_rank_of_another_says_so(hurried: Path) -> None:
    """Started by one rank of an MPI job, for instance: whether the others come, nobody can know before the timeout."""
    (report,) = failed(hurried, open_mpi(2)[0])
    assert report.exit_code == 1
    assert "1 of 2 came within 0:00:04, and these ranks are missing: 1." in report.traceback
    assert "A process that is to run alone must not inherit the variables of a launcher" in report.traceback


def test_two_jobs_at_one_port_are_an_error_at_once(script: Path, port: int) -> None:
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    (first, _), (_, stranger) = slurm(2), slurm(2)
    reports = failed(script, {**first, **meeting}, {**stranger, **meeting})
    (report,) = (each for each in reports if "but another job meets there (2 ranks, slurm" in each.traceback)
    assert report.exit_code == 1, "whichever claimed the meeting second"
