"""Whether each rank reaches each other one, by plain connections: what cannot be reached is named, and holds nobody up."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from accel_launch.starting.interfaces import address_towards

PATIENCE = 3.0
"""Seconds that a rank may take to answer."""
_PINGS = 10
_CLOCK = struct.Struct("d")


class Door(NamedTuple):
    """The host and port at which a rank answers."""

    host: str
    port: int


class DoorKeeper:
    """Answers the others, each time with what its clock says."""

    def __init__(self, towards: str) -> None:
        """Opens a door at the address of this machine that lies towards `towards`, the meeting point."""
        host = bound_address() or address_towards(towards) or socket.gethostname()
        self._server = socket.create_server(("", 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        self.door = Door(host, self._server.getsockname()[1])
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        """Answers nobody from now on."""
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=_answer, args=(self._server.accept()[0],), daemon=True).start()


def bound_address() -> str | None:
    """The IPv4 address of the interface that gloo was told to use; None if it was told none."""
    name = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    if not name:
        return None
    from accel_launch.starting.interfaces import addresses_of

    return next(iter(addresses_of(name)), None)


def knock(doors: Mapping[int, Door]) -> dict[int, dict[str, Any]]:
    """Tries each door: rank → how long an answer takes, in ms, and how far its clock is ahead, in s; or what went wrong."""
    with ThreadPoolExecutor(8) as pool:
        return dict(zip(doors, pool.map(_try, doors.values()), strict=True))


def _try(door: Door) -> dict[str, Any]:
    try:
        with socket.create_connection(door, timeout=PATIENCE) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            best, ahead = min(_ping(connection) for _ in range(_PINGS))
    except OSError as error:
        return {"error": str(error) or type(error).__name__, "at": f"{door.host}:{door.port}"}
    return {"ms": best * 1000, "clock": ahead}


def _ping(connection: socket.socket) -> tuple[float, float]:
    sent, start = time.time(), time.perf_counter()
    connection.sendall(b"?")
    (clock,) = _CLOCK.unpack(_receive(connection, _CLOCK.size))
    took = time.perf_counter() - start
    return took, clock - (sent + took / 2)


def _answer(connection: socket.socket) -> None:
    with connection, contextlib.suppress(OSError):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while connection.recv(1):
            connection.sendall(_CLOCK.pack(time.time()))


def _receive(connection: socket.socket, size: int) -> bytes:
    content = b""
    while len(content) < size:
        more = connection.recv(size - len(content))
        if not more:
            raise ConnectionError("the connection was closed")
        content += more
    return content


def to_text(door: Door) -> str:
    """The JSON text of a door, which `from_text` reads."""
    return json.dumps(door)


def from_text(text: str | bytes) -> Door:
    """The door that `to_text` has written."""
    return Door(*json.loads(text))
