"""What launchers say is read as data; what contradicts itself is an error that shows what was found."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accel_core.base.errors import WorldError
from accel_core.processes.launch_environment import Place, read_place

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
MEETING = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "4000"}
SLURM = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "5",
    "SLURM_STEP_NUM_TASKS": "6",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3)",
    "SLURM_STEP_NODELIST": "gpu[07-09]",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
MVAPICH = {name.replace("OMPI", "MV2"): value for name, value in OPEN_MPI.items()}
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
PALS = {"PMI_RANK": "1", "PMI_SIZE": "2", "PMI_LOCAL_RANK": "1", "PMI_LOCAL_SIZE": "2"}
AGENT = {"TORCHELASTIC_RUN_ID": "none"}


def where(place: Place) -> tuple[str, int, int, int, int]:
    return place.source, place.rank, place.size, place.local_rank, place.local_size


def without(environ: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name not in names}


def test_process_that_nobody_launched_is_alone() -> None:
    assert read_place({"PATH": "/bin", "MASTER_ADDR": "somewhere"}) == Place()
    assert where(Place()) == ("alone", 0, 1, 0, 1)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        (TORCHRUN, ("torchrun", 3, 4, 1, 2)),
        (SLURM, ("slurm", 5, 6, 1, 2)),
        (OPEN_MPI, ("mpi", 1, 2, 1, 2)),
        (MVAPICH, ("mpi", 1, 2, 1, 2)),
        (HYDRA, ("mpi", 1, 2, 1, 2)),
        (PALS, ("mpi", 1, 2, 1, 2)),
    ],
    ids=["torchrun", "slurm", "open-mpi", "mvapich", "hydra", "pals"],
)
def test_each_launcher_is_read(environ: dict[str, str], expected: tuple[str, int, int, int, int]) -> None:
    """The world size is what the launcher started."""
    assert where(read_place(environ)) == expected


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        # torchrun, started by srun or mpirun, or inside an allocation
        ({**SLURM, **OPEN_MPI, **TORCHRUN, **AGENT}, ("torchrun", 3, 4, 1, 2)),
        ({"SLURM_JOB_ID": "77", "SLURM_NTASKS": "8", **TORCHRUN}, ("torchrun", 3, 4, 1, 2)),
        # another launcher of torchrun's kind, with several processes for each task around it
        ({**SLURM, **TORCHRUN, "RANK": "7", "WORLD_SIZE": "12"}, ("torchrun", 7, 12, 1, 2)),
        # the script of a user, who repeats what Slurm says, all of it or some
        ({**SLURM, "RANK": "5", "WORLD_SIZE": "6", "LOCAL_RANK": "1"}, ("slurm", 5, 6, 1, 2)),
        ({**SLURM, "WORLD_SIZE": "6"}, ("slurm", 5, 6, 1, 2)),
        ({**SLURM, "RANK": "", "WORLD_SIZE": ""}, ("slurm", 5, 6, 1, 2)),
        # salloc without srun; its shell, where that is a step of its own kind; a shell that srun started
        ({"SLURM_JOB_ID": "77", "SLURM_NTASKS": "8", "SLURM_TASKS_PER_NODE": "8"}, ("alone", 0, 1, 0, 1)),
        ({**SLURM, "SLURM_STEP_ID": "4294967290"}, ("alone", 0, 1, 0, 1)),
        ({**SLURM, "SLURM_STEP_ID": "4294967291"}, ("alone", 0, 1, 0, 1)),
        (
            {
                **SLURM,
                "SLURM_PROCID": "0",
                "SLURM_LOCALID": "0",
                "SLURM_NODEID": "0",
                "SLURM_STEP_NUM_TASKS": "1",
                "SLURM_NTASKS": "8",
                "SLURM_STEP_TASKS_PER_NODE": "1",
            },
            ("slurm", 0, 1, 0, 1),
        ),
        # what direct starts by srun add, with the libraries of MPI that Slurm supports
        ({**SLURM, "PMIX_RANK": "5", "PMIX_NAMESPACE": "slurm.pmix.77.0"}, ("slurm", 5, 6, 1, 2)),
    ],
)
def test_launchers_inside_others_mean_what_the_innermost_says(
    environ: dict[str, str], expected: tuple[str, int, int, int, int]
) -> None:
    assert where(read_place(environ)) == expected


@pytest.mark.parametrize(
    ("more", "found"),
    [
        ({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}, "RANK='0', WORLD_SIZE='1', LOCAL_RANK='0'"),
        ({"RANK": "4", "WORLD_SIZE": "6"}, "RANK='4'"),
        ({"WORLD_SIZE": "8"}, "WORLD_SIZE='8'"),
        ({"RANK": "5", "WORLD_SIZE": "6", "LOCAL_RANK": "0"}, "LOCAL_RANK='0'"),
    ],
)
def test_ranks_set_by_hand_that_contradict_the_launcher_are_errors(more: dict[str, str], found: str) -> None:
    """A RANK=0, WORLD_SIZE=1 left in a batch script must not make every task a world of one."""
    with pytest.raises(WorldError, match="place of this process is told twice, and differently") as caught:
        read_place({**SLURM, **more})
    message = str(caught.value)
    assert f"Found {found} beside what slurm says (SLURM_PROCID is set): rank 5 of 6, local rank 1 of 2" in message
    assert "unset SLURM_STEP_ID, SLURM_PROCID to give the place yourself" in message


def test_mpirun_inside_a_slurm_job_wins_over_the_step_that_started_its_daemons() -> None:
    assert where(read_place({**SLURM, **OPEN_MPI})) == ("mpi", 1, 2, 1, 2)
    assert where(read_place({**SLURM, **HYDRA})) == ("mpi", 1, 2, 1, 2)


def test_slurm_step_that_offers_pmi_is_read_as_slurm() -> None:
    assert where(read_place({**SLURM, "PMI_RANK": "5", "PMI_SIZE": "6"})) == ("slurm", 5, 6, 1, 2)


def test_batch_script_of_slurm_is_one_process() -> None:
    assert read_place({"SLURM_JOB_ID": "77", "SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_LOCALID": "0"}) == Place()


def test_reading_changes_no_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SLURM.items():
        monkeypatch.setenv(name, value)
    before = dict(os.environ)
    read_place(os.environ).meeting_point()
    assert dict(os.environ) == before


@pytest.mark.parametrize(
    ("environ", "problem"),
    [
        ({"RANK": "0"}, "WORLD_SIZE is missing"),
        ({"WORLD_SIZE": "2"}, "RANK is missing"),
        (without(TORCHRUN, "LOCAL_RANK"), "LOCAL_RANK is missing"),
        (without(TORCHRUN, "LOCAL_WORLD_SIZE"), "LOCAL_WORLD_SIZE is missing"),
        ({**TORCHRUN, "RANK": "4"}, "contradict each other"),
        ({**TORCHRUN, "LOCAL_RANK": "2"}, "contradict each other"),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "5"}, "contradict each other"),
        ({**TORCHRUN, "RANK": "one"}, "RANK='one' is not a whole number"),
        ({**TORCHRUN, "RANK": "-1"}, "RANK='-1' is not a whole number"),
        ({**TORCHRUN, "MASTER_PORT": "http"}, "MASTER_PORT='http' is no port"),
        ({**TORCHRUN, "MASTER_PORT": "70000"}, "MASTER_PORT='70000' is no port"),
    ],
)
def test_contradictions_of_torchrun_are_errors(environ: dict[str, str], problem: str) -> None:
    with pytest.raises(WorldError, match="says that torchrun started this process") as caught:
        read_place(environ)
    message = str(caught.value)
    assert problem in message
    assert f"Found RANK={environ.get('RANK')!r}, WORLD_SIZE={environ.get('WORLD_SIZE')!r}, LOCAL_RANK=" in message
    assert "torchrun --nproc-per-node 2 script.py" in message


@pytest.mark.parametrize(
    ("environ", "problem"),
    [
        (without(SLURM, "SLURM_STEP_NUM_TASKS"), "SLURM_STEP_NUM_TASKS or SLURM_NTASKS is missing"),
        (without(SLURM, "SLURM_LOCALID"), "SLURM_LOCALID is missing"),
        (without(SLURM, "SLURM_NODEID"), "SLURM_NODEID is missing"),
        ({**SLURM, "SLURM_NODEID": "3"}, "has no node 3"),
        ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "two"}, "has no node 2"),
        (without(HYDRA, "MPI_LOCALRANKID"), "MPI_LOCALRANKID is missing"),
        (without(OPEN_MPI, "OMPI_COMM_WORLD_SIZE"), "OMPI_COMM_WORLD_SIZE is missing"),
        ({"PMIX_RANK": "1", "PMIX_NAMESPACE": "prterun-host-1@1"}, "OMPI_COMM_WORLD_SIZE is missing"),
    ],
)
def test_incomplete_variables_of_other_launchers_are_errors_and_not_worlds_of_one(
    environ: dict[str, str], problem: str
) -> None:
    """A rank whose launcher is not understood must not train alone."""
    with pytest.raises(WorldError, match=problem):
        read_place(environ)


@pytest.mark.parametrize(
    ("tasks", "node", "expected"), [("4", "0", 4), ("2(x3),4", "3", 4), ("1,3(x2)", "2", 3), ("2(x3)", "0", 2)]
)
def test_local_size_of_slurm_is_that_of_this_node(tasks: str, node: str, expected: int) -> None:
    environ = {**SLURM, "SLURM_STEP_TASKS_PER_NODE": tasks, "SLURM_NODEID": node, "SLURM_STEP_NUM_TASKS": "20"}
    assert read_place({**environ, "SLURM_LOCALID": "0"}).local_size == expected


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("login", "login"),
        ("a,b", "a"),
        ("gpu[07-09]", "gpu07"),
        ("gpu[3,5-7],big1", "gpu3"),
        ("rack[1-2]n[04-05].example.org", "rack1n04.example.org"),
    ],
)
def test_ranks_of_slurm_meet_at_the_first_node(nodes: str, first: str) -> None:
    place = read_place({**SLURM, "SLURM_STEP_NODELIST": nodes, "MASTER_PORT": "4000"})
    assert place.meeting_point() == f"tcp://{first}:4000"


def test_port_of_slurm_follows_from_the_job_and_is_the_same_on_every_rank() -> None:
    ports = {read_place({**SLURM, "SLURM_PROCID": str(rank)}).port for rank in range(6)}
    (port,) = ports
    assert port is not None
    assert 15000 <= port < 30000
    assert read_place({**SLURM, "SLURM_JOB_ID": "78"}).port != port
    assert read_place({**SLURM, "SLURM_STEP_ID": "1"}).port != port
    assert read_place({**SLURM, "SLURM_PROCID": "0"}).job == "77 0"


@given(first=st.integers(1, 10**9), jobs=st.integers(2, 40), steps=st.integers(1, 30))
def test_jobs_that_start_together_have_ports_of_their_own(first: int, jobs: int, steps: int) -> None:
    """By arithmetic, and not only most of the time."""
    ports = [
        read_place({**SLURM, "SLURM_JOB_ID": str(first + job), "SLURM_STEP_ID": str(step)}).port
        for job in range(jobs)
        for step in range(steps)
    ]
    assert len(set(ports)) == len(ports)


@pytest.mark.parametrize("form", ["prterun-node07-{}@1", "{}", "{}.server.example.org"])
def test_jobs_of_mpi_that_start_together_have_ports_of_their_own(form: str) -> None:
    """Names with the process id of mpirun, the number in `OMPI_MCA_ess_base_jobid`, those of PBS."""
    scale = 65536 if form == "{}" else 1
    ports = {read_place({**OPEN_MPI, "PMIX_NAMESPACE": form.format(pid * scale)}).port for pid in range(400, 600)}
    assert len(ports) == 200


def test_mpi_in_an_allocation_of_slurm_meets_at_its_first_node_at_a_port_of_the_job() -> None:
    """The ranks on the first node know of no step, the others of that which started their daemon: the port is the same."""
    allocation = {"SLURM_JOB_ID": "77", "SLURM_JOB_NODELIST": "gpu[07-08]", **HYDRA, "PMI_SIZE": "4", "PMI_RANK": "0"}
    first = read_place({**allocation, "MPI_LOCALRANKID": "0"})
    other = read_place({**allocation, "PMI_RANK": "3", "SLURM_STEP_ID": "0", "SLURM_PROCID": "0"})
    assert first.meeting_point() == other.meeting_point() == f"tcp://gpu07:{first.port}"


def test_ranks_on_one_machine_need_no_name_to_be_found() -> None:
    alone = {**SLURM, "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_NODEID": "0"}
    place = read_place({**alone, "SLURM_PROCID": "1", "SLURM_STEP_NODELIST": "gpu07"})
    assert place.meeting_point() == f"tcp://127.0.0.1:{place.port}"


def test_given_meeting_point_wins() -> None:
    for environ in (TORCHRUN, SLURM, OPEN_MPI):
        assert read_place({**environ, **MEETING}).meeting_point() == "tcp://10.0.0.1:4000"
    assert read_place({**TORCHRUN, **MEETING, "MASTER_ADDR": "fe80::1"}).meeting_point() == "tcp://[fe80::1]:4000"


def test_ranks_of_mpi_on_one_machine_meet_there_at_a_port_of_the_job() -> None:
    place = read_place({**OPEN_MPI, "PMIX_NAMESPACE": "prterun-host-1@1"})
    assert place.meeting_point() == f"tcp://127.0.0.1:{place.port}"
    assert place.port != read_place({**OPEN_MPI, "PMIX_NAMESPACE": "prterun-host-2@1"}).port


@pytest.mark.parametrize(
    ("environ", "missing"),
    [
        (HYDRA, "Set MASTER_PORT,"),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "4"}, "Set MASTER_ADDR and MASTER_PORT,"),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "4", "MASTER_PORT": "1"}, "Set MASTER_ADDR,"),
        (TORCHRUN, "Set MASTER_ADDR and MASTER_PORT,"),
    ],
)
def test_unknown_meeting_point_is_an_error_that_says_what_to_set(environ: dict[str, str], missing: str) -> None:
    place = read_place(environ)
    with pytest.raises(WorldError, match="have to meet somewhere. Found MASTER_ADDR=") as caught:
        place.meeting_point()
    assert missing in str(caught.value)


def test_restarts_of_torchrun_are_counted_only_where_all_ranks_are_local() -> None:
    restarted = {**TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "2"}
    assert (read_place(restarted).agent, read_place(restarted).attempt) == (True, 0)
    assert read_place({**restarted, "WORLD_SIZE": "2", "RANK": "1"}).attempt == 2
