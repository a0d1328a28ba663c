"""The rendezvous of a machine that is alone: torch's `static`, at a port that is free and not shared."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.distributed import PrefixStore, TCPStore
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from accel_core.api.launcher import loopback_listener

if TYPE_CHECKING:
    from accel_launch.starting.meeting_store import Address


class StaticRendezvous(RendezvousHandler):
    """The parts of torch's protocol that a rendezvous without rounds of its own does not need."""

    def get_backend(self) -> str:
        """The name of it in torch's messages."""
        return "static"

    def get_run_id(self) -> str:
        """The id of the run in torch's messages."""
        return "accel"

    def is_closed(self) -> bool:
        """Whether nobody can meet here any more."""
        return False

    def set_closed(self) -> None:
        """Does nothing: the store ends with the launcher."""


class OneMachine(StaticRendezvous):
    """The rendezvous of a machine that is alone: its store listens at a free port, and at the loopback where it can.

    Raises:
        DistError: if the port is not free.
    """

    def __init__(self, address: Address) -> None:
        host, port = address
        listener = loopback_listener(host, port)
        self._store = TCPStore(
            host,
            port if listener is None else listener.getsockname()[1],
            is_master=True,
            wait_for_workers=False,
            multi_tenant=True,
            master_listen_fd=None if listener is None else listener.detach(),
        )
        self._meeting_point = RendezvousStoreInfo(host, self._store.port)

    @property
    def use_agent_store(self) -> bool:
        """Whether the ranks use the store that the launcher hosts."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """See base class."""
        return RendezvousInfo(PrefixStore("agents", self._store), 0, 1, self._meeting_point)

    def num_nodes_waiting(self) -> int:
        """None, ever."""
        return 0

    def shutdown(self) -> bool:
        """See base class."""
        return True
