"""The store at which machines meet: machine 0 opens it at main_process_ip:main_process_port, the others find it there."""

from __future__ import annotations

import contextlib
import socket
import threading
from datetime import timedelta
from typing import NamedTuple

from torch.distributed import DistError, TCPStore
from torch.distributed.elastic.rendezvous import RendezvousError

from accel_launch.starting.interfaces import own_addresses
from accel_launch.starting.interruptible_store import Board
from accel_launch.starting.listeners import listener_at

ANSWER = timedelta(seconds=10)
"""The time that a listener at the meeting point has to answer as a store. A program that is none may never answer."""

_PATIENCE = timedelta(seconds=2)  # of one attempt to connect
_NEAR = timedelta(seconds=0.5)  # for a store of this host to answer
_OPENED = "opened"  # the key under which machine 0 leaves its identity


class MeetingError(RendezvousError):
    """The machines of a run do not meet, or one that was met is gone: says who, where, and what to do."""


class BoardLostError(MeetingError):
    """Machine 0, which keeps the store, is gone."""


class Address(NamedTuple):
    """The host and port at which the machines meet."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def open_board(address: Address, identity: str) -> Board:
    """Opens the store on this machine, which is machine 0, and makes sure that it is what the others find at `address`.

    Returns:
        The store at `address`: this machine's, or that of another machine 0 that had it first.
            `opened_by` tells.

    Raises:
        MeetingError: another program has the port, or `address` is not this machine's.
    """
    if not _is_free(address.port):
        return _find_other(address)
    try:
        own = Board("127.0.0.1", address.port, is_master=True, wait_for_workers=False, timeout=ANSWER)
    except DistError as error:
        raise _port_taken(address) from error
    own.set(_OPENED, identity)
    try:
        _knock(address)
        found = _connect(address)
    except OSError as error:
        raise MeetingError(
            f"Machine 0 was to be met at {address}, but this machine, which is machine 0, does not reach itself there: "
            f"{error}. Found these addresses of this machine: {', '.join(own_addresses()) or 'none'}. Give the one that the "
            f"other machines reach as main_process_ip, the same on every machine; or give this machine another machine_rank."
        ) from error
    if opened_by(found) != identity:
        return found  # of another machine 0; what was opened here closes with its last reference
    return own


def find_board(address: Address) -> tuple[Board | None, str]:
    """The store that machine 0 has opened at `address`; or None, and why it is not there yet. Looks once.

    Raises:
        MeetingError: what listens there is no store.
    """
    try:
        _knock(address)
        board = _connect(address)
        return (board, "") if opened_by(board) else (None, "a store answers there that no machine 0 has opened")
    except (OSError, DistError) as error:
        return None, str(error).splitlines()[0]


def opened_by(board: TCPStore) -> str:
    """The identity of the machine 0 that opened `board`; empty if none has."""
    return board.get(_OPENED).decode() if board.check([_OPENED]) else ""


def connect_again(board: TCPStore, address: Address) -> Board:
    """A connection of its own to the same store, for another thread."""
    host = "127.0.0.1" if board.host == "127.0.0.1" else address.host
    return _connect(Address(host, address.port))


def _connect(address: Address, timeout: timedelta | None = None) -> Board:
    """A connection to the store at `address`, where something listens. torch alone might wait for an answer for ever.

    Raises:
        MeetingError: what listens there does not speak as a store.
        ConnectionError: nothing listens there any more.
    """
    timeout = timeout or ANSWER
    answer: list[Board | Exception] = []

    def connect() -> None:
        try:
            answer.append(Board(address.host, address.port, is_master=False, wait_for_workers=False, timeout=timeout))
        except Exception as error:  # noqa: BLE001  (it is raised below, by the thread that asked)
            answer.append(error)

    asking = threading.Thread(target=connect, daemon=True)
    asking.start()
    asking.join(timeout.total_seconds())
    if answer and isinstance(answer[0], Board):
        return answer[0]
    if not _listens(address):
        raise ConnectionError("what listened there has ended")
    reason = "it does not answer" if not answer else str(answer[0]).splitlines()[0]
    raise MeetingError(
        f"The machines were to meet at {address}, but what listens there is no store of machine 0 ({reason}). Another "
        f"program seems to use this port: give all machines another main_process_port, one that is free on machine 0."
    )


def _knock(address: Address) -> None:
    """Raises `OSError` if nothing listens at `address`. Without it torch's client would log a stack for every attempt."""
    with socket.create_connection((address.host, address.port), timeout=_PATIENCE.total_seconds()):
        pass


def _listens(address: Address) -> bool:
    try:
        _knock(address)
    except OSError:
        return False
    return True


def _find_other(address: Address) -> Board:
    """The store of another machine 0 that was started on this host. Raises `MeetingError` if something else is there."""
    with contextlib.suppress(MeetingError, OSError):
        board = _connect(Address("127.0.0.1", address.port), _NEAR)
        if opened_by(board):
            return board
    raise _port_taken(address)


def _is_free(port: int) -> bool:
    with socket.socket(socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def free_port(preferred: int) -> int:
    """`preferred` if it is free on this machine, else one that is."""
    if preferred < 1 << 16 and _is_free(preferred):
        return preferred
    with socket.socket(socket.AF_INET) as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
        return port


def _port_taken(address: Address) -> MeetingError:
    owner = listener_at(address.port)
    return MeetingError(
        f"Machine 0 was to open port {address.port} for the machines to meet at {address}, but it is taken"
        f"{f' by {owner}' if owner else ', by a process that this user may not see'}. Give all machines another "
        f"main_process_port, or end what uses this one."
    )
