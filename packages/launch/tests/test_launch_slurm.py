"""Under Slurm, MPI or torchrun the launcher joins what is there, or starts more processes where there is one task on each node.

There is no Slurm and no MPI where these tests run: what they leave in the environment is all that a launcher sees of them.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
from start_many import Launch, run_together

from accel_launch.errors import LaunchError
from accel_launch.options import LaunchOptions
from accel_launch.starting.plan import Plan, make_plan

JOB = str(os.getpid())


def slurm(rank: int, tasks: int, nodes: int) -> dict[str, str]:
    """What `srun` gives one of its tasks; the nodes are addresses of this machine."""
    each = tasks // nodes
    return {
        "SLURM_JOB_ID": JOB,
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": str(tasks),
        "SLURM_STEP_TASKS_PER_NODE": f"{each}(x{nodes})",
        "SLURM_STEP_NODELIST": ",".join(f"127.0.0.{node + 1}" for node in range(nodes)),
        "SLURM_PROCID": str(rank),
        "SLURM_NODEID": str(rank // each),
        "SLURM_LOCALID": str(rank % each),
    }


def open_mpi(rank: int, size: int) -> dict[str, str]:
    return {
        "PMIX_NAMESPACE": f"job-{JOB}@1",
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_SIZE": str(size),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(rank),
        "OMPI_COMM_WORLD_LOCAL_SIZE": str(size),
    }


TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none",
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}


def planned(environ: dict[str, str], **options: Any) -> Plan:
    return make_plan(LaunchOptions(**options), True, environ)


@pytest.mark.parametrize("environ", [slurm(1, 2, 1), open_mpi(1, 2), TORCHRUN])
@pytest.mark.parametrize("options", [{}, {"num_processes": 2}])
def test_ranks_that_somebody_has_started_become_the_script(environ: dict[str, str], options: dict[str, Any]) -> None:
    plan = planned(environ, **options)
    assert (plan.way, plan.processes, plan.here, plan.variables, plan.meeting) == ("join", 2, 2, {}, None)
    assert (
        dict(plan.describe())["started here"]
        == f"this process becomes rank 1 of 2, which {plan.place.source} has started"
    )


def test_what_holds_for_a_rank_that_joins_is_handed_on() -> None:
    plan = planned(slurm(3, 4, 2), num_cpu_threads_per_process=3, main_process_ip="10.0.0.1", main_process_port=4711)
    assert plan.variables == {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "4711", "OMP_NUM_THREADS": "3"}
    assert (plan.launch.num_machines, plan.machine_rank) == (2, 1)


@pytest.mark.parametrize(
    "environ, options, message",
    [
        (
            slurm(0, 2, 1),
            {"max_restarts": 1, "tee": "3"},
            "max_restarts, tee were given, and slurm has started the 2 processes",
        ),
        (
            slurm(0, 2, 1),
            {"num_processes": 3},
            "num_processes=3 was given, and slurm has started 2 processes, 2 of them on this machine.",
        ),
        (
            slurm(0, 2, 2),
            {"num_processes": 3},
            "num_processes=3 was given, and slurm has started 2 processes, 1 of them on this",
        ),
        (open_mpi(0, 2), {"num_processes": 4}, "num_processes=4 was given, and mpi has started 2 processes, 2 of them"),
        (
            TORCHRUN,
            {"num_processes": 4},
            "num_processes=4 was given, and torchrun has started 2 processes, of which this is one.",
        ),
        (TORCHRUN, {"main_process_port": 1}, "torchrun, which has started this process, says localhost:29500."),
        (
            slurm(0, 2, 1),
            {"num_machines": 2},
            "num_machines=2, machine_rank=None were given, and slurm has started rank 0 of 2",
        ),
        (
            slurm(0, 2, 2),
            {"num_processes": 4, "num_machines": 3},
            "num_machines=3, machine_rank=None were given, and slurm has",
        ),
    ],
)
def test_what_does_not_fit_to_the_other_launcher_is_refused(
    environ: dict[str, str], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(LaunchError, match=re.escape(message)):
        planned(environ, **options)


@pytest.mark.parametrize("nodes", [1, 2])
def test_one_device_a_node_has_an_agent_where_one_is_asked_for(nodes: int) -> None:
    """The templates of examples/slurm give --num-processes and --shutdown-timeout, however many devices a node has."""
    plan = planned(slurm(0, nodes, nodes), num_processes=nodes, shutdown_timeout=100)
    assert (plan.way, plan.here, plan.processes) == ("agent", 1, nodes)
    assert planned(slurm(0, nodes, nodes), num_processes=nodes).way == "join"


def test_one_task_on_each_node_is_one_machine_each() -> None:
    plan = planned(slurm(1, 2, 2), num_processes=8)
    assert (plan.way, plan.here, plan.processes, plan.machine_rank) == ("agent", 4, 8, 1)
    assert plan.meeting is not None
    assert re.fullmatch(r"127\.0\.0\.1:\d+", plan.meeting.endpoint)
    assert plan.meeting.endpoint == planned(slurm(0, 2, 2), num_processes=8).meeting.endpoint  # type: ignore[union-attr]
    one = planned(slurm(0, 1, 1), num_processes=4)
    assert (one.here, one.launch.num_machines, str(one.meeting)) == (4, 1, "on this machine, at a free port")


def test_batch_script_without_srun_is_one_machine() -> None:
    batch = {"SLURM_JOB_ID": JOB, "SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
    assert (planned(batch, num_processes=2).way, planned(batch, num_processes=2).here) == ("agent", 2)
    assert planned(batch).way == "alone"


@pytest.mark.timeout(120)
def test_tasks_train_together_and_start_more_processes(tmp_path: Path) -> None:
    """Four launchers at once: two tasks that join, and two, each on a node of its own, that start two processes each."""
    show = "$echo $RANK $WORLD_SIZE $LOCAL_RANK $GROUP_RANK"
    launches = [
        *(Launch(f"join-{rank}", "collective", environment=slurm(rank, 2, 1)) for rank in (0, 1)),
        *(Launch(f"node-{rank}", show, {"num_processes": 4}, environment=slurm(rank, 2, 2)) for rank in (0, 1)),
    ]
    results = run_together(launches, tmp_path)
    assert [(result.status, result.errors) for result in results.values()] == [(0, "")] * 4
    assert [re.findall(r"\d\.\d", results[f"join-{rank}"].output) for rank in (0, 1)] == [["2.0"]] * 2
    lines = [results[f"node-{rank}"].output.splitlines() for rank in (0, 1)]
    assert [sorted(each) for each in lines] == [["0 4 0 0", "1 4 1 0"], ["2 4 0 1", "3 4 1 1"]]
