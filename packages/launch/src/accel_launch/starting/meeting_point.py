"""The rendezvous of the machines of a run, as data for torch's agent."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from accel_launch.errors import LaunchError
from accel_launch.starting.interfaces import address_towards

if TYPE_CHECKING:
    from accel_launch.options import LaunchOptions

MACHINES, HERE = "machines", "here"
"""The rendezvous of this package: torch's, once machines have claimed their ranks; and that of a machine that is alone."""

_LOCAL = "localhost"


class Address(NamedTuple):
    """The host and port at which machines meet."""

    host: str
    port: int

    def __str__(self) -> str:
        is_bare = ":" in self.host and not self.host.startswith("[")  # of IPv6
        return f"[{self.host}]:{self.port}" if is_bare else f"{self.host}:{self.port}"


@dataclass(frozen=True)
class MeetingPoint:
    """A rendezvous."""

    backend: str  # its name among torch's rendezvous handlers
    endpoint: str  # host:port; port 0 is a free one
    run_id: str  # the name of the job there
    machines: tuple[int, int] = (1, 1)  # how few and how many machines take part
    options: Mapping[str, Any] = field(default_factory=dict)  # what the backend is told beside that
    local_addr: str | None = None  # the address by which others reach this machine; None: its host name

    def __str__(self) -> str:
        if self.backend == HERE:
            return "on this machine, at a free port" if self.endpoint.endswith(":0") else f"at {self.endpoint}"
        way = "by their machine ranks" if self.backend == MACHINES else f"by torch's rendezvous {self.backend!r}"
        return f"at {self.endpoint}, {way}, as {self.run_id!r}"


def on_this_machine(launch: LaunchOptions) -> MeetingPoint:
    """The meeting point of a run that has this machine only: a free port, unless one was given."""
    _refuse_rendezvous_options(launch)
    host = launch.main_process_ip or _LOCAL
    endpoint, run_id = str(Address(host, launch.main_process_port or 0)), f"accel-{uuid.uuid4().hex[:12]}"
    return MeetingPoint(HERE, endpoint, run_id, local_addr=launch.local_addr or host)


def by_machine_rank(launch: LaunchOptions, rank: int, host: str, port: int, processes: int) -> MeetingPoint:
    """The meeting point of several machines, for that with `rank`; the run has `processes`."""
    _refuse_rendezvous_options(launch)
    told = {"rank": rank, "processes": processes, "restarts": launch.max_restarts, "timeout": launch.meeting_timeout}
    count, own = launch.num_machines, launch.local_addr or address_towards(host)
    return MeetingPoint(MACHINES, str(Address(host, port)), "accel", (count, count), told, own)


def by_backend(launch: LaunchOptions) -> MeetingPoint:
    """The meeting point of torch's rendezvous of a name; `LaunchError` if something is missing."""
    backend, asked = str(launch.rdzv_backend), f"rdzv_backend={launch.rdzv_backend} was given"
    host, port, count = launch.main_process_ip, launch.main_process_port, launch.num_machines
    endpoint = launch.rdzv_endpoint
    if endpoint is None and host is not None and port:
        endpoint = str(Address(host, port))
    if endpoint is None and backend == "c10d" and count == 1:
        endpoint = str(Address(_LOCAL, 0))
    if endpoint is None:
        raise LaunchError(
            f"{asked}, and not where: main_process_ip {host}, main_process_port {port}. Add --rdzv-endpoint HOST:PORT."
        )
    seconds = max(1, round(launch.meeting_timeout.total_seconds()))
    options: dict[str, Any] = {"join_timeout": seconds, "timeout": seconds, **(launch.rdzv_conf or {})}
    if backend == "static":
        if launch.machine_rank is None and count > 1:
            raise LaunchError(f"{asked} for {count} machines, and not which one this is. Add --machine-rank.")
        options["rank"] = launch.machine_rank or 0
    elif launch.machine_rank is not None:
        raise LaunchError(
            f"{asked} beside machine_rank={launch.machine_rank}, and this rendezvous numbers machines as they come."
        )
    if backend.startswith("etcd") and launch.rdzv_id is None:
        raise LaunchError(f"{asked}, whose server many jobs share, and no name for this one. Add --rdzv-id.")
    machines = (launch.min_machines or count, count)
    return MeetingPoint(backend, endpoint, launch.rdzv_id or "accel", machines, options, launch.local_addr)


def _refuse_rendezvous_options(launch: LaunchOptions) -> None:
    names = ("rdzv_endpoint", "rdzv_id", "rdzv_conf", "min_machines")
    if given := [name for name in names if getattr(launch, name) is not None]:
        raise LaunchError(
            f"{' and '.join(given)} {'was' if len(given) == 1 else 'were'} given, which is for a rendezvous of torch's, "
            "and none was chosen. Add --rdzv-backend c10d, say; or leave it out."
        )
