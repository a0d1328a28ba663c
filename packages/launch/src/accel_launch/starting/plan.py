"""The plan of a start on this machine: from options, and from a launcher around this one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from accel_core.api.launcher import Place, read_place
from accel_launch.errors import LaunchError
from accel_launch.output import warn
from accel_launch.starting import meeting_point
from accel_launch.starting.checks import check_output, check_values, given
from accel_launch.starting.devices import (
    THREADS,
    Accelerators,
    confined,
    find_accelerators,
    find_accelerators_elsewhere,
    threads_of_each,
)
from accel_launch.starting.flight_recorder import recording
from accel_launch.starting.interfaces import variables_towards

if TYPE_CHECKING:
    from accel_launch.options import LaunchOptions
    from accel_launch.starting.meeting_point import MeetingPoint

FOR_JOINING = (
    "num_processes", "num_machines", "machine_rank", "main_process_ip", "main_process_port", "device_ids",
    "num_cpu_threads_per_process", "debug", "log_level",
)  # fmt: skip
"""Options that hold where another launcher has started the processes, too. The others are about starting them."""

OWN_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
"""Makes the processes of each round meet at a store of their own: under that of the launchers their keys have the number of the
restart, which each machine counts for itself; and torch announces its address in the first round only, so that a machine that
joins later would wait for it."""

FOR_ONE = (*FOR_JOINING, "meeting_timeout", "local_addr")
"""Options that need no agent where one process is started on one machine."""


@dataclass(frozen=True)
class Plan:
    """The plan of a start on this machine."""

    launch: LaunchOptions  # the options
    # `join`: this process becomes a rank that another launcher has started; `alone`: it becomes the only rank; `agent`:
    # it starts ranks, looks after them, and starts them again
    way: Literal["join", "alone", "agent"]
    place: Place  # what another launcher has said of this process
    processes: int  # of the whole run
    here: int  # processes of this machine
    machine_rank: int | None = 0  # which machine this is; None if a rendezvous will tell
    meeting: MeetingPoint | None = None  # where the machines meet, and their ranks; only with an agent
    variables: Mapping[str, str] = field(default_factory=dict)  # what is added to the environment of the processes
    accelerators: Accelerators | None = None  # those that are there; None if nobody had to look

    def describe(self) -> list[tuple[str, str]]:
        """The plan as pairs of a name and a text, in the order in which they are read best."""
        how = {
            "join": f"this process becomes rank {self.place.rank} of {self.place.size}, which {self.place.source} has started",
            "alone": "this process becomes the script",
            "agent": f"{self.here} under an agent that looks after {'it' if self.here == 1 else 'them'}",
        }
        rows = [("processes", f"{self.processes} in all"), ("started here", how[self.way])]
        if self.launch.num_machines > 1:
            rank = self.machine_rank
            which = "which one this is, the rendezvous tells" if rank is None else f"this is {rank}"
            rows.append(("machines", f"{self.launch.num_machines}; {which}"))
        if self.meeting is not None:
            rows.append(("meeting", str(self.meeting)))
            if self.launch.num_machines > 1:
                rows.append(("waits for others", f"{self.launch.meeting_timeout.total_seconds():g} s"))
        if self.accelerators is not None:
            rows.append(("accelerators", str(self.accelerators)))
        rows += [("variable", f"{name}={value}") for name, value in self.variables.items()]
        if self.way == "agent":
            rows += [
                ("restarts", str(self.launch.max_restarts)),
                ("time to end", f"{self.launch.shutdown_timeout} s, then they are killed"),
            ]
        return rows


def make_plan(launch: LaunchOptions, cpu: bool, environ: Mapping[str, str]) -> Plan:
    """Decides what to start here. Starts nothing; imports torch only to count accelerators.

    `cpu` says that the run uses the CPU only; `environ` shows another launcher around this process.
    Raises `LaunchError` if the options do not fit each other, this machine or that launcher;
    `WorldError` if what the latter has said contradicts itself.
    """
    check_values(launch)
    if cpu and launch.device_ids is not None:
        raise LaunchError(
            f"device_ids={','.join(map(str, launch.device_ids))} was given beside cpu, which uses no accelerator."
        )
    place = read_place(environ)
    if place.source == "alone":
        return _started_here(launch, cpu, environ, place)
    if launch.num_processes in {None, place.size} and not _looks_after_one(launch, place):
        return _joined(launch, cpu, environ, place)
    return _started_here(_as_machine(launch, place), cpu, environ, place)


def _looks_after_one(launch: LaunchOptions, place: Place) -> bool:
    """Whether a task that is alone on its machine is asked to start and look after one process there."""
    alone = place.local_size == 1 and place.source != "torchrun" and launch.num_processes == place.size
    return alone and any(name not in FOR_JOINING for name in given(launch))


def _joined(launch: LaunchOptions, cpu: bool, environ: Mapping[str, str], place: Place) -> Plan:
    """The plan of a rank that another launcher has started."""
    idle = [name for name in given(launch) if name not in FOR_JOINING]
    if idle:
        raise LaunchError(
            f"{', '.join(idle)} {'was' if len(idle) == 1 else 'were'} given, and {place.source} has started the "
            f"{place.size} processes of this run already. Give it to {place.source}; or start one task on each node, "
            "and with --num-processes how many they make in all."
        )
    nodes, rank = _machine(launch, place)
    told = {"MASTER_ADDR": launch.main_process_ip, "MASTER_PORT": launch.main_process_port or None}
    variables = {name: str(value) for name, value in told.items() if value is not None}
    if variables and place.source == "torchrun":
        raise LaunchError(
            f"{' and '.join(f'{name.lower()}={value}' for name, value in variables.items())} was given as the address "
            "and port of the main process, and torchrun, which has started this process, says "
            f"{place.address}:{place.port}. Leave main_process_ip and main_process_port out."
        )
    found = None
    if launch.device_ids is not None:
        found = _found(launch)
        variables |= confined(launch.device_ids, found, environ)
    if launch.num_cpu_threads_per_process is not None:
        variables[THREADS] = str(launch.num_cpu_threads_per_process)
    variables |= {} if cpu else recording(launch.log_dir, environ)
    if place.source != "torchrun" and not cpu and launch.num_processes is None and launch.device_ids is None:
        _warn_of_idle(place)
    return Plan(
        replace(launch, num_machines=nodes), "join", place, place.size, place.local_size, rank, None, variables, found
    )


def _machine(launch: LaunchOptions, place: Place) -> tuple[int, int]:
    """The number of machines, and that of this one, by another launcher. `LaunchError` if options say other ones."""
    nodes, rank = place.size // place.local_size, place.rank // place.local_size
    if launch.num_machines not in {1, nodes} or launch.machine_rank not in {None, rank}:
        raise LaunchError(
            f"num_machines={launch.num_machines}, machine_rank={launch.machine_rank} were given, and {place.source} has "
            f"started rank {place.rank} of {place.size}, with {place.local_size} on this machine. Leave them out: "
            f"{place.source} says it."
        )
    return nodes, rank


def _warn_of_idle(place: Place) -> None:
    """One task on a machine with several accelerators trains on one of them: that is seldom meant."""
    if place.rank == 0 and place.local_size == 1 and (count := find_accelerators().count) > 1:
        warn(
            f"accel launch: {place.source} has started one task on this machine, which uses one of its {count} accelerators. To use all, add "
            f"--num-processes {count * place.size}; if one is meant, add --num-processes {place.size}."
        )


def _as_machine(launch: LaunchOptions, place: Place) -> LaunchOptions:
    """The options of one machine, where another launcher started one process on each machine."""
    asked = f"num_processes={launch.num_processes} was given, and {place.source} has started {place.size} processes"
    if place.source == "torchrun":
        raise LaunchError(f"{asked}, of which this is one. Leave num_processes out; or start without torchrun.")
    if place.local_size != 1 or (launch.num_processes or 0) % place.size:
        raise LaunchError(
            f"{asked}, {place.local_size} of them on this machine. Leave num_processes out to join these; or start one "
            "task on each node (srun --ntasks-per-node=1), and give a multiple of their number."
        )
    nodes, rank = _machine(launch, place)
    if nodes == 1 or launch.rdzv_backend is not None:
        return replace(launch, num_machines=nodes)
    return replace(
        launch,
        num_machines=nodes,
        machine_rank=rank,
        main_process_ip=launch.main_process_ip or place.address,
        main_process_port=launch.main_process_port or place.port,
    )


def _started_here(launch: LaunchOptions, cpu: bool, environ: Mapping[str, str], place: Place) -> Plan:
    """The plan of processes that are started from here."""
    machines = launch.num_machines
    if (launch.num_processes or 0) % machines:
        raise LaunchError(
            f"num_processes={launch.num_processes} was given for num_machines={machines}, and each machine starts "
            f"equally many. Give the processes of all machines together, a multiple of {machines}."
        )
    found, variables = _accelerators(launch, cpu, environ)
    count = 0 if found is None else len(launch.device_ids or []) or found.count
    here = (launch.num_processes or 0) // machines or count or 1
    if found is not None and found.count and here > count:  # on a machine without any, processes share its cores
        visible = f"device_ids names {count}" if launch.device_ids else f"this machine has {found}"
        raise LaunchError(
            f"{here} processes were asked for on this machine, and {visible}: each process uses one accelerator of its "
            f"own. Give --num-processes {count * machines}, or --cpu to train on the CPU."
        )
    check_output(launch, here)
    threads = threads_of_each(here, launch.num_cpu_threads_per_process, environ)
    variables |= {} if threads is None else {THREADS: str(threads)}
    if here == machines == 1 and not [name for name in given(launch) if name not in FOR_ONE]:
        return Plan(launch, "alone", place, 1, 1, 0, None, variables, found)
    variables |= {} if cpu else recording(launch.log_dir, environ)
    rank, meeting = _meeting(launch, here * machines)
    if meeting.backend == meeting_point.MACHINES:
        variables |= variables_towards(launch.local_addr or str(launch.main_process_ip), environ)
    if machines > 1 and (launch.max_restarts or launch.rdzv_backend):
        variables[OWN_STORE] = "1"
    return Plan(launch, "agent", place, here * machines, here, rank, meeting, variables, found)


def _accelerators(
    launch: LaunchOptions, cpu: bool, environ: Mapping[str, str]
) -> tuple[Accelerators | None, dict[str, str]]:
    """The accelerators, None if they do not matter, and the variables that confine the run."""
    # One process can have at most one accelerator too many, which torch will say: no need to import it here.
    alone = launch.num_processes == launch.num_machines and launch.device_ids is None and launch.numa_binding is None
    if cpu or alone:
        return None, {}
    found = _found(launch)
    return found, {} if launch.device_ids is None else confined(launch.device_ids, found, environ)


def _found(launch: LaunchOptions) -> Accelerators:
    # Torch binds ranks to the cores near a device from this process, which has to see those that the run is confined to.
    elsewhere = launch.device_ids is not None and launch.numa_binding is not None
    return find_accelerators_elsewhere() if elsewhere else find_accelerators()


def _meeting(launch: LaunchOptions, processes: int) -> tuple[int | None, MeetingPoint]:
    """This machine's rank, None if the meeting will tell; and where the machines meet."""
    if launch.rdzv_backend is not None:
        return launch.machine_rank, meeting_point.by_backend(launch)
    if launch.num_machines == 1:
        return 0, meeting_point.on_this_machine(launch)
    rank, host, port = launch.machine_rank, launch.main_process_ip, launch.main_process_port
    if rank is None or host is None or not port:
        told = {"machine_rank RANK": rank, "main_process_ip ADDRESS": host, "main_process_port PORT": port or None}
        missing = [name for name, value in told.items() if value is None]
        raise LaunchError(
            f"num_machines={launch.num_machines} was given, and not {', '.join(name.split()[0] for name in missing)}. "
            f"Add {' '.join(f'--{name}'.replace('_', '-') for name in missing)}: they meet at machine 0, at a free port."
        )
    return rank, meeting_point.by_machine_rank(launch, rank, host, port, processes)
