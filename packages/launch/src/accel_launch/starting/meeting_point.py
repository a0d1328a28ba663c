"""The rendezvous of the machines of a run, as data for torch's agent."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from accel_launch.starting.errors import LaunchError
from accel_launch.starting.interfaces import address_towards

if TYPE_CHECKING:
    from accel_launch.options import LaunchOptions

MACHINES = "machines"
"""The rendezvous of this package: torch's, once machines have claimed their ranks."""

HERE = "here"
"""The rendezvous of this package for a machine that is alone."""

_LOCAL = "localhost"


@dataclass(frozen=True)
class MeetingPoint:
    """A rendezvous.

    Args:
        backend: its name among torch's rendezvous handlers.
        endpoint: host:port; port 0 is a free one.
        run_id: the name of the job there.
        machines: how few and how many machines take part.
        options: what the backend is told beside that.
        local_addr: the address by which others reach this machine; None: its host name.
    """

    backend: str
    endpoint: str
    run_id: str
    machines: tuple[int, int] = (1, 1)
    options: Mapping[str, Any] = field(default_factory=dict)
    local_addr: str | None = None

    def __str__(self) -> str:
        if self.backend == HERE:
            return "on this machine, at a free port" if self.endpoint.endswith(":0") else f"at {self.endpoint}"
        way = "by their machine ranks" if self.backend == MACHINES else f"by torch's rendezvous {self.backend!r}"
        return f"at {self.endpoint}, {way}, as {self.run_id!r}"


def on_this_machine(launch: LaunchOptions) -> MeetingPoint:
    """The meeting point of a run that has this machine only: a free port, unless one was given."""
    _refuse_rendezvous_options(launch)
    host = launch.main_process_ip or _LOCAL
    return MeetingPoint(
        backend=HERE,
        endpoint=address(host, launch.main_process_port or 0),
        run_id=f"accel-{uuid.uuid4().hex[:12]}",
        local_addr=launch.local_addr or host,
    )


def by_machine_rank(launch: LaunchOptions, rank: int, host: str, port: int, processes: int) -> MeetingPoint:
    """The meeting point of several machines, of which this is the one with `rank`; `processes` is the size of the run."""
    _refuse_rendezvous_options(launch)
    return MeetingPoint(
        backend=MACHINES,
        endpoint=address(host, port),
        run_id="accel",
        machines=(launch.num_machines, launch.num_machines),
        options={
            "rank": rank,
            "processes": processes,
            "restarts": launch.max_restarts,
            "timeout": launch.meeting_timeout,
        },
        local_addr=launch.local_addr or address_towards(host),
    )


def by_backend(launch: LaunchOptions) -> MeetingPoint:
    """The meeting point that a rendezvous of torch's gives, which was asked for by name.

    Raises:
        LaunchError: if something is missing that it needs.
    """
    backend, asked = str(launch.rdzv_backend), f"rdzv_backend={launch.rdzv_backend} was given"
    endpoint = launch.rdzv_endpoint
    if endpoint is None and launch.main_process_ip is not None and launch.main_process_port:
        endpoint = address(launch.main_process_ip, launch.main_process_port)
    if endpoint is None and backend == "c10d" and launch.num_machines == 1:
        endpoint = address(_LOCAL, 0)
    if endpoint is None:
        raise LaunchError(
            f"{asked}, and not where it is: main_process_ip is {launch.main_process_ip}, main_process_port "
            f"{launch.main_process_port}. Add --rdzv-endpoint HOST:PORT."
        )
    options: dict[str, Any] = {
        "join_timeout": _seconds(launch),
        "timeout": _seconds(launch),
        **(launch.rdzv_conf or {}),
    }
    if backend == "static":
        if launch.machine_rank is None and launch.num_machines > 1:
            raise LaunchError(
                f"{asked} for {launch.num_machines} machines, and not which one this is. Add --machine-rank."
            )
        options["rank"] = launch.machine_rank or 0
    elif launch.machine_rank is not None:
        raise LaunchError(
            f"{asked} beside machine_rank={launch.machine_rank}, and this rendezvous numbers machines as they come. Leave "
            f"machine_rank out; or leave rdzv_backend out, so that each machine has the rank that it is given."
        )
    if backend.startswith("etcd") and launch.rdzv_id is None:
        raise LaunchError(f"{asked}, whose server many jobs share, and no name for this one. Add --rdzv-id.")
    return MeetingPoint(
        backend=backend,
        endpoint=endpoint,
        run_id=launch.rdzv_id or "accel",
        machines=(launch.min_machines or launch.num_machines, launch.num_machines),
        options=options,
        local_addr=launch.local_addr,
    )


def address(host: str, port: int) -> str:
    """host:port, with brackets around an address of IPv6."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def _refuse_rendezvous_options(launch: LaunchOptions) -> None:
    names = ("rdzv_endpoint", "rdzv_id", "rdzv_conf", "min_machines")
    given = [name for name in names if getattr(launch, name) is not None]
    if given:
        raise LaunchError(
            f"{' and '.join(given)} {'was' if len(given) == 1 else 'were'} given, which is for a rendezvous of torch's, and "
            f"none was chosen. Add --rdzv-backend c10d, say; or leave {'it' if len(given) == 1 else 'them'} out."
        )


def _seconds(launch: LaunchOptions) -> int:
    return max(1, round(launch.meeting_timeout.total_seconds()))
