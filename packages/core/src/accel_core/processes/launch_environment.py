"""The launchers' variables: read here alone, never written. Launchers are rows of `LAUNCHERS`."""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, NoReturn

from accel_core.base.errors import WorldError

# Unprivileged, and below what kernels give to clients; a prime of them, so that similar identities have different ones.
_PORTS = range(15000, 29983)


class Launcher(NamedTuple):
    """The names of the variables of one kind of launcher; where there are several, best first."""

    source: str  # what `World.source` says
    marks: tuple[str, ...]  # it is taken to have started this process when all of these are set
    rank: str
    size: tuple[str, ...]
    local_rank: str
    local_size: tuple[str, ...]  # perhaps a list of tasks per node in Slurm's notation, "2(x3),1"
    node: str = ""  # the index of this node in such a list
    job: tuple[str, ...] = ()  # identities that all ranks of a job share; a port is derived from all that are set
    nodes: tuple[str, ...] = ()  # lists of the nodes in Slurm's notation; the first node hosts the store
    alone: tuple[tuple[str, str], ...] = ()  # variables and values that say that it has started this process alone

    def started(self, environ: Mapping[str, str]) -> bool:
        """Whether the variables say that it started this process, alone or as one of several."""
        alone = any(environ.get(name) == value for name, value in self.alone)
        return all(environ.get(mark) for mark in self.marks) and not alone


_TORCHRUN = Launcher("torchrun", ("RANK",), "RANK", ("WORLD_SIZE",), "LOCAL_RANK", ("LOCAL_WORLD_SIZE",))
# What jobs are called by batch systems that may have an mpirun inside. Not the steps of Slurm: an mpirun there starts its
# daemons on other nodes as a step, and the ranks on the first node without one.
_BATCH = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID")


def _mpi(names: tuple[str, str, str, str], *marks: str, job: tuple[str, ...] = _BATCH) -> Launcher:
    """A kind of mpirun, known by `marks` and the first of the four `names` of its variables."""
    rank, size, local_rank, local_size = names
    place = ((rank, *marks), rank, (size,), local_rank, (local_size,))
    return Launcher("mpi", *place, job=job, nodes=("SLURM_JOB_NODELIST",))


_OPEN_MPI = _mpi(
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    job=("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", *_BATCH),
)
_PMI = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")

# Users set torchrun's variables as well, so they are compared with those of the others. The second row is a size without a
# rank: an error that says so, and not a world of one.
TORCHRUN = (_TORCHRUN, _TORCHRUN._replace(marks=("WORLD_SIZE",)))
# The other launchers, in the order in which they are asked.
LAUNCHERS = (
    # mpirun inside a Slurm job starts its daemons with srun, whose variables the ranks inherit: so MPI comes first.
    _OPEN_MPI,
    # MVAPICH2, then MPICH and Intel MPI
    _mpi(("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE")),
    _mpi(_PMI, "MPI_LOCALRANKID"),
    _mpi(("PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE"), "PMI_LOCAL_RANK"),
    Launcher(
        source="slurm",
        # A batch script has a process id too, and is one process all the same: only steps of srun have a step id.
        marks=("SLURM_STEP_ID", "SLURM_PROCID"),
        rank="SLURM_PROCID",
        size=("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
        local_rank="SLURM_LOCALID",
        local_size=("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"),
        node="SLURM_NODEID",
        job=("SLURM_JOB_ID", "SLURM_STEP_ID"),
        nodes=("SLURM_STEP_NODELIST", "SLURM_NODELIST"),
        # The ids that Slurm keeps for its own steps: the shell of salloc, the batch script, and what is outside.
        alone=tuple(("SLURM_STEP_ID", str(number)) for number in range(4294967290, 4294967294)),
    ),
    _mpi(_PMI),  # after Slurm, whose steps may offer PMI as well
    # PMIx alone gives a rank, but no size: an error that says so, and not a world of one.
    _OPEN_MPI._replace(marks=("PMIX_RANK",), rank="PMIX_RANK"),
)


@dataclass(frozen=True)
class Place:
    """The place of this process, checked to fit together, and where its world meets."""

    source: str = "alone"  # or "torchrun", "slurm", "mpi"
    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    address: str | None = None  # of the store at which the ranks meet
    port: int | None = None
    agent: bool = False  # whether the launcher itself hosts that store
    attempt: int = 0  # how often the launcher has restarted the job, if all ranks are local
    job: str = ""  # what the launcher calls the job

    def meeting_point(self) -> str:
        """The URL at which the ranks meet. Raises `WorldError` if the environment does not tell."""
        missing = [name for name, value in (("MASTER_ADDR", self.address), ("MASTER_PORT", self.port)) if value is None]
        if missing:
            raise WorldError(
                f"The {self.size} ranks ({self.source}) have to meet somewhere. Found MASTER_ADDR={self.address}, "
                f"MASTER_PORT={self.port}. Set {' and '.join(missing)}, on every rank: the host of rank 0, and a free port there."
            )
        host = f"[{self.address}]" if ":" in str(self.address) else self.address
        return f"tcp://{host}:{self.port}"


def read_place(environ: Mapping[str, str]) -> Place:
    """Reads this process's place from its environment; alone without variables of a launcher.

    torchrun's variables win where torchrun set them, or where they make a larger world than the
    launcher around them; else they have to say the same. `WorldError` if variables contradict.
    """
    inner = next((row for row in TORCHRUN if row.started(environ)), None)
    launcher = next((row for row in LAUNCHERS if row.started(environ)), None)
    if launcher is None or (inner is not None and environ.get("TORCHELASTIC_RUN_ID")):
        return Place() if inner is None else _place(inner, environ)
    place = _place(launcher, environ)
    if inner is None:
        return place
    size = environ.get("WORLD_SIZE", "")
    if environ.get("RANK") and size.isdecimal() and int(size) > place.size:
        return _place(inner, environ)
    names = (_TORCHRUN.rank, *_TORCHRUN.size, _TORCHRUN.local_rank, *_TORCHRUN.local_size)
    told = zip(names, map(str, (place.rank, place.size, place.local_rank, place.local_size)), strict=True)
    other = [f"{name}={environ[name]!r}" for name, value in told if (environ.get(name) or value) != value]
    if other:
        raise WorldError(
            f"The place of this process is told twice, and differently. Found {', '.join(other)} beside what "
            f"{launcher.source} says ({launcher.marks[-1]} is set): rank {place.rank} of {place.size}, local rank "
            f"{place.local_rank} of {place.local_size}. Unset {', '.join(names)} to start with {launcher.source}, or unset "
            f"{', '.join(launcher.marks)} to give the place yourself."
        )
    return place


def _place(launcher: Launcher, environ: Mapping[str, str]) -> Place:
    reader = _Reader(launcher, environ)
    rank, size = reader.number(launcher.rank), reader.number(*launcher.size)
    local_rank, local_size = reader.number(launcher.local_rank), reader.local_size()
    if not (rank < size and local_rank < local_size <= size):
        reader.fail("They contradict each other: a rank must be below its size, and a local size at most the size")
    one_machine = local_size == size
    restarts = environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return Place(
        *(launcher.source, rank, size, local_rank, local_size),
        address=environ.get("MASTER_ADDR") or ("127.0.0.1" if one_machine else reader.first_node()),
        port=reader.port(),
        agent=launcher.source == "torchrun" and environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        attempt=int(restarts) if one_machine and restarts.isdecimal() else 0,
        job=reader.job(),
    )


class _Reader(NamedTuple):
    """Reads the variables of one launcher, and says what it found when they do not add up."""

    launcher: Launcher
    environ: Mapping[str, str]

    def fail(self, problem: str) -> NoReturn:
        row = self.launcher
        names = (row.rank, *row.size, row.local_rank, *row.local_size)
        found = ", ".join(f"{name}={self.environ.get(name)!r}" for name in names)
        raise WorldError(
            f"The environment says that {row.source} started this process ({row.marks[0]} is set). {problem}. Found {found}. Set "
            f"all of them, as launchers do (`torchrun --nproc-per-node 2 script.py`), or unset them to run one process alone."
        )

    def text(self, *names: str) -> str | None:
        return next((value for name in names if (value := self.environ.get(name))), None)

    def number(self, *names: str) -> int:
        value = self.text(*names)
        if value is None:
            self.fail(f"{' or '.join(names)} is missing")
        if not value.isdecimal():
            self.fail(f"{' or '.join(names)}={value!r} is not a whole number")
        return int(value)

    def local_size(self) -> int:
        names = self.launcher.local_size
        value = self.text(*names)
        if not self.launcher.node or value is None:
            return self.number(*names)
        # The number of tasks of each node: "2(x3),1" is [2, 2, 2, 1].
        sound = re.fullmatch(r"\d+(\(x\d+\))?(,\d+(\(x\d+\))?)*", value)
        pairs = re.findall(r"(\d+)(?:\(x(\d+)\))?", value) if sound else []
        tasks = [int(count) for count, times in pairs for _ in range(int(times or 1))]
        node = self.number(self.launcher.node)
        if node >= len(tasks):
            self.fail(f"{' or '.join(names)}={value!r} has no node {node} ({self.launcher.node})")
        return tasks[node]

    def first_node(self) -> str | None:
        """The first host of a list: "rack[07-12,20]n[1-3],login" begins with rack07n1."""
        value = self.text(*self.launcher.nodes)
        first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", value or "")
        return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first.group()) if value and first else None

    def port(self) -> int | None:
        """MASTER_PORT, else a port made from what identifies the job, the same on every rank."""
        value = self.environ.get("MASTER_PORT")
        if value:
            if not value.isdecimal() or not 0 < int(value) < 1 << 16:
                self.fail(f"MASTER_PORT={value!r} is no port")
            return int(value)
        job = self.job()
        # Jobs whose identities differ in one number, or by little, have different ports on one host.
        number = zlib.crc32(re.sub(r"\d+", "", job).encode())
        for digits in re.findall(r"\d+", job):
            number = number * 61 + int(digits)
        return _PORTS[number % len(_PORTS)] if job else None

    def job(self) -> str:
        return " ".join(self.environ[name] for name in self.launcher.job if self.environ.get(name))
