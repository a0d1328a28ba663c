"""Plain connections from each rank to each other one, with a time limit; names those that fail."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from accel_launch.starting.interfaces import address_towards, addresses_of

PATIENCE = 3.0
"""Seconds that a rank may take to answer."""


class Door(NamedTuple):
    """The host and port at which a rank answers."""

    host: str
    port: int


class DoorKeeper:
    """Answers the others with one byte, at this machine's address on the way to `towards`."""

    def __init__(self, towards: str) -> None:
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
                with self._server.accept()[0] as connection, contextlib.suppress(OSError):
                    connection.sendall(b"!")


def bound_address() -> str | None:
    """The first address of the interface that gloo was told to use; None if it was told none."""
    name = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    return next(iter(addresses_of(name)), None)


def knock(doors: Mapping[int, Door]) -> dict[int, dict[str, Any]]:
    """Tries each door: rank → how long an answer takes, in ms; or what went wrong."""
    with ThreadPoolExecutor(8) as pool:
        return dict(zip(doors, pool.map(_try, doors.values()), strict=True))


def _try(door: Door) -> dict[str, Any]:
    start = time.perf_counter()
    try:
        with socket.create_connection(door, timeout=PATIENCE) as connection:
            if not connection.recv(1):
                raise ConnectionError("the connection was closed")
    except OSError as error:
        return {"error": str(error) or type(error).__name__, "at": f"{door.host}:{door.port}"}
    return {"ms": (time.perf_counter() - start) * 1000}
