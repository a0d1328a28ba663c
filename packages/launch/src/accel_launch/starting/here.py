"""The meeting of a machine that is alone: a store at a free port, and nobody to wait for.

torch's "c10d" does that too, but waits up to 0.3 seconds at random before it begins, so that
machines do not all come at once, and then keeps a thread that says again and again that this
machine still lives.
"""

from __future__ import annotations

from torch.distributed import PrefixStore, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from accel_core.api.launcher import loopback_listener
from accel_launch.starting.meeting_point import HERE


def register() -> None:
    """Makes this rendezvous known to torch as `here`."""
    rendezvous_handler_registry.register(HERE, _create)


def _create(parameters: RendezvousParameters) -> RendezvousHandler:
    host, port = parse_rendezvous_endpoint(parameters.endpoint, 0)
    return LonelyRendezvous(host, port, parameters.run_id)


class LonelyRendezvous(RendezvousHandler):
    """The rendezvous of one machine, which hosts the store at which its ranks meet.

    Args:
        host: by which the ranks reach this machine.
        port: of the store; 0: a free one.
        run_id: what torch calls the run.

    Raises:
        DistError: if the port is not free.
    """

    def __init__(self, host: str, port: int, run_id: str) -> None:
        self._run_id = run_id
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

    def get_backend(self) -> str:
        """See base class."""
        return HERE

    @property
    def use_agent_store(self) -> bool:
        """Whether the ranks use the store that the launcher hosts."""
        return True

    def get_run_id(self) -> str:
        """See base class."""
        return self._run_id

    def next_rendezvous(self) -> RendezvousInfo:
        """See base class."""
        return RendezvousInfo(PrefixStore(self._run_id, self._store), 0, 1, self._meeting_point)

    def num_nodes_waiting(self) -> int:
        """None, ever."""
        return 0

    def is_closed(self) -> bool:
        """See base class."""
        return False

    def set_closed(self) -> None:
        """Does nothing: the store ends with the launcher."""

    def shutdown(self) -> bool:
        """See base class."""
        return True
