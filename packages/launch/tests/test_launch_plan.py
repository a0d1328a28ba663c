"""What is started is decided before anything is, and everything that does not fit is refused with what to type instead."""

from __future__ import annotations

import os
import re
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from accel_launch.errors import LaunchError
from accel_launch.options import LaunchOptions
from accel_launch.starting import plan as planning
from accel_launch.starting.checks import read_streams
from accel_launch.starting.devices import (
    Accelerators,
    confined,
    find_accelerators,
    find_accelerators_elsewhere,
    threads_of_each,
    usable_cores,
)
from accel_launch.starting.flight_recorder import recording, recording_again
from accel_launch.starting.plan import OWN_STORE, Plan, make_plan

FOUR = Accelerators("cuda", 4)
MACHINES: dict[str, Any] = {
    "num_machines": 2,
    "machine_rank": 1,
    "main_process_ip": "10.0.0.1",
    "main_process_port": 29500,
    "num_processes": 4,
}


def planned(cpu: bool = True, environ: dict[str, str] | None = None, **options: Any) -> Plan:
    return make_plan(LaunchOptions(**options), cpu, environ or {})


def test_one_process_needs_no_agent_unless_an_option_does() -> None:
    assert planned().way == "alone"
    assert planned(num_processes=1, main_process_port=29500).way == "alone"
    for option in (
        {"num_processes": 2},
        {"max_restarts": 1},
        {"log_dir": Path("logs")},
        {"tee": "3"},
        {"role": "worker"},
    ):
        assert planned(**option).way == "agent"


def test_n_means_n_on_the_cpu_and_the_default_is_one() -> None:
    assert (planned(num_processes=2).here, planned(num_processes=2).processes) == (2, 2)
    assert (planned().here, planned(**{**MACHINES, "num_processes": None}).processes) == (1, 2)


def test_this_machine_meets_at_a_free_port_or_at_the_given_one() -> None:
    meeting = planned(num_processes=2).meeting
    assert meeting is not None
    assert (meeting.backend, meeting.endpoint, meeting.local_addr) == ("here", "localhost:0", "localhost")
    assert str(meeting) == "on this machine, at a free port"
    meeting = planned(num_processes=2, main_process_port=29501, main_process_ip="::1").meeting
    assert meeting is not None
    assert (meeting.endpoint, str(meeting)) == ("[::1]:29501", "at [::1]:29501")


def test_machines_meet_by_their_ranks() -> None:
    plan = planned(**MACHINES, meeting_timeout=timedelta(minutes=2))
    assert (plan.here, plan.processes, plan.machine_rank) == (2, 4, 1)
    assert plan.meeting is not None
    assert (plan.meeting.backend, plan.meeting.endpoint) == ("machines", "10.0.0.1:29500")
    assert plan.meeting.options == {"rank": 1, "processes": 4, "restarts": 0, "timeout": timedelta(minutes=2)}


def test_rendezvous_of_torch_gets_what_it_needs() -> None:
    base = {"num_machines": 2, "num_processes": 4}
    plan = planned(
        **base,
        rdzv_backend="c10d",
        rdzv_endpoint="host:1",
        min_machines=1,
        rdzv_id="job",
        rdzv_conf={"is_host": "true"},
    )
    assert plan.meeting is not None
    assert plan.machine_rank is None
    assert (plan.meeting.machines, plan.meeting.run_id, plan.meeting.options["is_host"]) == ((1, 2), "job", "true")
    assert [each.variables.get(OWN_STORE) for each in (plan, planned(**MACHINES, max_restarts=1))] == ["1", "1"]
    assert OWN_STORE not in planned(**MACHINES).variables
    plan = planned(**MACHINES, rdzv_backend="static")
    assert plan.meeting is not None
    assert (plan.meeting.endpoint, plan.meeting.options["rank"]) == ("10.0.0.1:29500", 1)
    assert planned(num_processes=2, rdzv_backend="c10d").meeting is not None


@pytest.mark.parametrize(
    "options, message",
    [
        ({"num_processes": 0}, "num_processes=0 was given. It counts processes of the whole run: give 1 or more."),
        (
            {"main_process_port": 70000},
            "main_process_port=70000 was given. It counts ports; 0 is a free one: give 0 to 65535.",
        ),
        ({"monitor_interval": 0}, "monitor_interval=0 was given."),
        ({"num_machines": 2, "min_machines": 3}, "min_machines=3 was given beside num_machines=2"),
        ({"machine_rank": 1}, "machine_rank=1 was given, and there are num_machines=1, with ranks from 0 to 0."),
        (
            {"num_machines": 2},
            "not machine_rank, main_process_ip, main_process_port. Add --machine-rank RANK --main-process-ip",
        ),
        ({**MACHINES, "main_process_port": 0}, "not main_process_port. Add --main-process-port PORT"),
        (
            {**MACHINES, "num_processes": 3},
            "num_processes=3 was given for num_machines=2, and each machine starts equally many.",
        ),
        (
            {**MACHINES, "min_machines": 1},
            "min_machines was given, which is for a rendezvous of torch's, and none was chosen.",
        ),
        (
            {"num_processes": 2, "rdzv_id": "a", "rdzv_conf": {"b": "c"}},
            "rdzv_id and rdzv_conf were given, which is for a",
        ),
        ({"num_machines": 2, "rdzv_backend": "c10d"}, "rdzv_backend=c10d was given, and not where: "),
        (
            {**MACHINES, "rdzv_backend": "c10d"},
            "beside machine_rank=1, and this rendezvous numbers machines as they come.",
        ),
        ({**MACHINES, "rdzv_backend": "static", "machine_rank": None}, "for 2 machines, and not which one this is."),
        (
            {"num_processes": 2, "rdzv_backend": "etcd-v2", "rdzv_endpoint": "h:1"},
            "whose server many jobs share, and no name",
        ),
        ({"device_ids": [0]}, "device_ids=0 was given beside cpu, which uses no accelerator."),
        ({"tee": "4"}, "tee='4' was given. Type 0 (none), 1 (standard output), 2 (errors) or 3 (both)"),
        (
            {"num_processes": 2, "local_ranks_filter": [5, 6]},
            "local_ranks_filter=[5, 6] names no process of this machine, so nothing would be shown.",
        ),
        (
            {"local_ranks_filter": []},
            "local_ranks_filter=[] names no process of this machine, so nothing would be shown.",
        ),
    ],
)
def test_what_does_not_fit_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(LaunchError, match=re.escape(message)):
        planned(**options)


def test_plan_says_what_will_happen() -> None:
    described = planned(**MACHINES, max_restarts=2, tee="0:3", num_cpu_threads_per_process=3).describe()
    rows = dict(described)
    assert rows["processes"] == "4 in all"
    assert rows["started here"] == "2 under an agent that looks after them"
    assert rows["machines"] == "2; this is 1"
    assert rows["meeting"] == "at 10.0.0.1:29500, by their machine ranks, as 'accel'"
    assert ("variable", "OMP_NUM_THREADS=3") in described
    assert rows["restarts"] == "2"
    assert rows["time to end"] == "10 s, then they are killed"
    assert dict(planned().describe())["started here"] == "this process becomes the script"


def test_ranks_above_nine_have_output_too() -> None:
    assert read_streams("tee", "11:3", 12)[11] == 3


def test_accelerators_are_counted_among_those_that_are_visible() -> None:
    assert confined([0, 2], FOUR, {}) == {"CUDA_VISIBLE_DEVICES": "0,2"}
    assert confined([1, 3], FOUR, {"CUDA_VISIBLE_DEVICES": "4,5,GPU-a, 7"}) == {"CUDA_VISIBLE_DEVICES": "5,7"}
    assert confined([1], Accelerators("xpu", 2), {}) == {"ZE_AFFINITY_MASK": "1"}


def test_devices_of_amd_are_chosen_by_the_variable_that_their_driver_prefers():
    found = Accelerators("cuda", 2, hip=True)
    assert confined([1], found, {}) == {"HIP_VISIBLE_DEVICES": "1"}
    assert confined([1], found, {"HIP_VISIBLE_DEVICES": "6,7"}) == {"HIP_VISIBLE_DEVICES": "7"}
    assert confined([1], found, {"CUDA_VISIBLE_DEVICES": "4,5"}) == {"HIP_VISIBLE_DEVICES": "5"}


def test_devices_to_bind_to_are_counted_in_another_process(monkeypatch):
    """The driver reads once what this process sees, and torch binds ranks from here, behind the choice."""
    monkeypatch.setattr(planning, "find_accelerators", lambda: pytest.fail("asked in this process"))
    monkeypatch.setattr(planning, "find_accelerators_elsewhere", lambda: FOUR)
    plan = planned(cpu=False, device_ids=[2, 3], numa_binding="node")
    assert plan.variables["CUDA_VISIBLE_DEVICES"] == "2,3"


def test_another_process_counts_as_this_one_does():
    assert find_accelerators_elsewhere() == find_accelerators()


@pytest.mark.parametrize(
    "ids, found, message",
    [
        (
            [4],
            FOUR,
            "device_ids=4 was given, and the accelerators of this machine that torch sees are: 4 of type cuda.",
        ),
        ([0], Accelerators(), "the accelerators of this machine that torch sees are: none."),
        ([1, 1], FOUR, "device_ids=1,1 was given, and the accelerators"),
        ([], FOUR, "Give their numbers, from 0, each once; or leave it out"),
        (
            [0],
            Accelerators("mps", 1),
            "for accelerators of type mps it is not known which variable selects some of them",
        ),
    ],
)
def test_accelerators_that_cannot_be_selected_are_refused(ids: list[int], found: Accelerators, message: str) -> None:
    with pytest.raises(LaunchError, match=re.escape(message)):
        confined(ids, found, {})


def test_processes_are_as_many_as_accelerators_and_never_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch finds is pretended: the machines that run this have no accelerators, or an unknown number."""
    monkeypatch.setattr(planning, "find_accelerators", lambda: FOUR)
    assert planned(cpu=False).here == 4
    assert planned(cpu=False, device_ids=[1, 3]).here == 2
    assert planned(cpu=False, device_ids=[1, 3]).variables["CUDA_VISIBLE_DEVICES"] == "1,3"
    assert planned(cpu=False, **{**MACHINES, "num_processes": None}).processes == 8
    assert planned(cpu=True, num_processes=8).here == 8
    assert dict(planned(cpu=False).describe())["accelerators"] == "4 of type cuda"
    with pytest.raises(
        LaunchError, match="5 processes were asked for on this machine, and this machine has 4 of type cuda: each"
    ):
        planned(cpu=False, num_processes=5)
    with pytest.raises(LaunchError, match="device_ids names 2: each process .* Give --num-processes 2, or --cpu"):
        planned(cpu=False, num_processes=3, device_ids=[0, 1])
    monkeypatch.setattr(planning, "find_accelerators", Accelerators)
    assert planned(cpu=False, num_processes=3).here == 3


def test_a_task_that_leaves_accelerators_idle_is_told_what_to_type(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(planning, "find_accelerators", lambda: FOUR)

    def said(rank: int = 0, each: int = 1, cpu: bool = False, **options: Any) -> str:
        environ = {
            "SLURM_JOB_ID": "1",
            "SLURM_STEP_ID": "0",
            "SLURM_STEP_NUM_TASKS": str(2 * each),
            "SLURM_STEP_TASKS_PER_NODE": f"{each}(x2)",
            "SLURM_STEP_NODELIST": "127.0.0.1,127.0.0.2",
            "SLURM_PROCID": str(rank),
            "SLURM_NODEID": str(rank // each),
            "SLURM_LOCALID": str(rank % each),
        }
        assert planned(cpu, environ, **options).way == "join"
        return capsys.readouterr().err

    assert (
        "one task on this machine, which uses one of its 4 accelerators. To use all, add --num-processes 8;" in said()
    )
    assert said(rank=1) == "", "the first says it for all"
    assert said(each=2) == ""
    assert said(cpu=True) == ""
    assert said(device_ids=[0]) == ""
    assert said(num_processes=2) == "", "who says how many means it"
    monkeypatch.setattr(planning, "find_accelerators", lambda: Accelerators("cuda", 1))
    assert said() == "", "the scheduler gives each task its own"


def test_cores_are_shared_unless_somebody_has_said_how() -> None:
    cores = usable_cores()
    assert threads_of_each(2, None, {}) == max(1, cores // 2)
    assert threads_of_each(10**6, None, {}) == 1
    assert threads_of_each(2, 3, {"OMP_NUM_THREADS": "7"}) == 3
    assert threads_of_each(2, None, {"OMP_NUM_THREADS": "7"}) is None


@pytest.mark.parametrize(
    "files, cores",
    [
        ({"cpu.max": "max 100000"}, None),
        ({"cpu.max": "150000 100000"}, 1),
        ({"cpu.max": "50000 100000"}, 1),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
        ({"cpu/cpu.cfs_quota_us": "100000", "cpu/cpu.cfs_period_us": "100000"}, 1),
        ({}, None),
    ],
)
def test_quota_of_a_container_counts(files: dict[str, str], cores: int | None, tmp_path: Path) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    all_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    assert usable_cores(tmp_path) == (cores or all_cores)


def test_flight_recorder_is_on_where_accelerators_are_used_and_dumps_into_the_folder_of_logs(
    monkeypatch, tmp_path
) -> None:
    monkeypatch.setattr(planning, "find_accelerators", lambda: FOUR)
    expected = {
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_FR_BUFFER_SIZE": "2000",
        "TORCH_FR_DUMP_TEMP_FILE": f"{tmp_path}/flight_recorder_rank_",
    }
    assert expected.items() <= planned(cpu=False, log_dir=tmp_path).variables.items()
    assert "TORCH_FR_DUMP_TEMP_FILE" not in planned(cpu=False).variables
    assert not expected.keys() & planned(num_processes=2, log_dir=tmp_path).variables.keys()
    rank = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    joined = planned(cpu=False, environ=rank | address)
    assert (joined.way, joined.variables["TORCH_NCCL_DUMP_ON_TIMEOUT"]) == ("join", "1")


def test_dumps_of_a_second_launch_stand_beside_those_of_the_first(tmp_path) -> None:
    for earlier, expected in (("rank_1", "launch_2_"), ("launch_2_attempt_1_rank_0", "launch_3_")):
        (tmp_path / f"flight_recorder_{earlier}").touch()
        variables = recording(tmp_path, {})
        assert variables["TORCH_FR_DUMP_TEMP_FILE"] == f"{tmp_path}/flight_recorder_{expected}rank_"
        again = recording_again(1, variables)["TORCH_FR_DUMP_TEMP_FILE"]
        assert again == f"{tmp_path}/flight_recorder_{expected}attempt_1_rank_"


def test_variables_of_the_flight_recorder_that_are_set_hold_under_either_name(tmp_path) -> None:
    given = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1", "TORCH_NCCL_DUMP_ON_TIMEOUT": "0", "TORCH_FR_BUFFER_SIZE": "9"}
    assert recording(None, given) == {}
    assert recording_again(1, {"TORCH_FR_DUMP_TEMP_FILE": "/tmp/mine"}) == recording_again(1, {}) == {}
    older = {"TORCH_NCCL_TRACE_BUFFER_SIZE": "9", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "/tmp/mine"}
    assert recording(tmp_path, older) == {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "3", "TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}
