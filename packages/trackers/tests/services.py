"""What the tests of services share: whether the client is installed, a home of their own, no network, and parts of readers.

from services import Offline, needs, offline  # noqa: F401 - a fixture of every test in this module

pytestmark = needs("wandb")
"""

from __future__ import annotations

import ipaddress
import os
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

REQUIRED = "ACCEL_SERVICES"  # names of services, joined by commas, whose tests must not be skipped
SERVICES = ("AIM", "CLEARML", "COMET", "DVC", "DVCLIVE", "HF", "MLFLOW", "SWANLAB", "TRACKIO", "TRAINS", "WANDB")
LOOK_UPS = ("getaddrinfo", "gethostbyname", "gethostbyname_ex", "gethostbyaddr")


def needs(name: str) -> pytest.MarkDecorator:
    """Skips a test, or a module as `pytestmark`, where the client of a service is not installed.

    Not so where the variable ACCEL_SERVICES names the service: there the module fails while it is collected.
    """
    installed = find_spec(name) is not None
    if not installed and name in os.environ.get(REQUIRED, "").replace(" ", "").split(","):
        pytest.fail(f"{name} is to be tested here ({REQUIRED} names it) and is not installed.", pytrace=False)
    return pytest.mark.skipif(not installed, reason=f"{name} is not installed")


@dataclass
class Offline:
    """Where a test of a service lives.

    Args:
        home: the home directory, empty at first.
        attempts: what was to be reached beyond this machine; each was refused, as if there were no network. Only Python's own calls
            are seen, and only in this process.
        tolerated: hosts of which an attempt is no failure, each added by the test that knows why.
    """

    home: Path
    attempts: list[str] = field(default_factory=list)
    tolerated: list[str] = field(default_factory=list)

    def refuse(self, host: str) -> OSError:
        self.attempts.append(host)
        return OSError(f"A test may not reach {host}")


@pytest.fixture(autouse=True)
def offline(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Offline]:
    """A home directory and an environment of the test's own, both gone after it, and a failure if it looks for the network."""
    place = Offline(tmp_path_factory.mktemp("home"))
    environment = dict(os.environ)
    for name in environment:
        if name.split("_")[0] in SERVICES:
            del os.environ[name]
    os.environ["HOME"] = os.environ["USERPROFILE"] = str(place.home)
    for name in ("CONFIG", "CACHE", "DATA", "STATE"):
        os.environ[f"XDG_{name}_HOME"] = str(place.home / name.lower())
    with monkeypatch.context() as patch:
        forbid_network(patch, place)
        yield place
    os.environ.clear()
    os.environ.update(environment)
    outside = [host for host in place.attempts if host not in place.tolerated]
    assert not outside, f"The test was to stay on this machine, and looked for {', '.join(outside)}."


def forbid_network(patch: pytest.MonkeyPatch, place: Offline) -> None:
    """Refuses connections, datagrams and look-ups of names that lead beyond this machine."""
    for name in LOOK_UPS:
        patch.setattr(socket, name, _guarded_look_up(getattr(socket, name), place))
    for name in ("connect", "connect_ex", "sendto"):
        patch.setattr(socket.socket, name, _guarded_send(getattr(socket.socket, name), place))


def record(tracker: Any, run: Any, work: Callable[[Any], None] = lambda tracker: None, *, failed: bool = False) -> None:
    """Records a run in a thread of its own, as trackers are called."""

    def whole() -> None:
        tracker.start(run)
        work(tracker)
        tracker.finish(failed)

    in_thread(whole)


def in_thread(work: Callable[[], None]) -> None:
    """Does the work in a thread of its own, and raises what it raises."""
    raised: list[BaseException] = []

    def guarded() -> None:
        try:
            work()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=guarded)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    if raised:
        raise raised[0]


def _guarded_look_up(look_up: Callable[..., Any], place: Offline) -> Callable[..., Any]:
    def guarded(host: Any, *arguments: Any, **options: Any) -> Any:
        if not _local(host):
            raise place.refuse(_text(host))
        return look_up(host, *arguments, **options)

    return guarded


def _guarded_send(send: Callable[..., Any], place: Offline) -> Callable[..., Any]:
    def guarded(self: socket.socket, *arguments: Any) -> Any:
        address = arguments[-1]
        # To connect a datagram socket sends nothing: it is how programs ask which of their own addresses leads outside.
        silent = self.type == socket.SOCK_DGRAM and send.__name__ != "sendto"
        if self.family in (socket.AF_INET, socket.AF_INET6) and not silent and not _local(address[0]):
            raise place.refuse(_text(address[0]))
        return send(self, *arguments)

    return guarded


def _local(host: Any) -> bool:
    """Whether a host is this machine, as a name or as an address."""
    name = _text(host)
    if name in {"", "localhost", socket.gethostname()}:
        return True
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return False
    return address.is_loopback or address.is_unspecified


def _text(host: Any) -> str:
    return "" if host is None else host.decode() if isinstance(host, bytes) else str(host)
