"""The store at which machines meet, which machine 0 keeps: who has come, who lives, and whether the run has begun or ended."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import NamedTuple, NoReturn

from torch.distributed import DistError, TCPStore
from torch.distributed.elastic.rendezvous import RendezvousError

from accel_launch.output import warn

SILENCE = 3.0
"""Seconds without a sign of life after which a machine is gone."""

FIRST_LINE, NEXT_LINE = 5.0, 60.0
"""Seconds after which a line says what is waited for, and between two such lines."""

CONNECT = timedelta(seconds=2)
"""The time of one attempt to connect."""

_POLL = 0.05
_ANSWER = 10.0  # seconds in which what listens there has to answer as a store

OPENED, FINISHED, LEFT = "opened", "finished", "left"
"""Keys: who opened the store; before a rank, that a machine's processes have ended well, and that it needs the store no more."""

PHASE, BEGUN, ENDED = "phase", "begun", "ended: "
"""The key of what has become of the run, and its values: empty while machines gather, begun, or ended with the reason."""


class MeetingError(RendezvousError):
    """The machines of a run do not meet, or one that was met is gone: says who, where, and what to do."""


class Address(NamedTuple):
    """The host and port at which machines meet."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True)
class Card:
    """The description of a machine that the others read.

    Args:
        rank: of the machine.
        machines, processes, restarts: what it was told about the whole run.
        host, pid: for messages.
        identity: of this start of the launcher; another start has another one.
    """

    rank: int
    machines: int
    processes: int
    restarts: int = 0
    host: str = field(default_factory=socket.gethostname)
    pid: int = field(default_factory=os.getpid)
    identity: str = field(default_factory=lambda: uuid.uuid4().hex)

    def __str__(self) -> str:
        return f"machine {self.rank} ({self.host}, process {self.pid})"

    @property
    def numbers(self) -> tuple[int, int, int]:
        """What has to be the same on all machines."""
        return self.machines, self.processes, self.restarts


class Waiting:
    """A wait with an end, which says now and then what for.

    Args:
        limit: seconds.
    """

    def __init__(self, limit: float) -> None:
        self._start = time.monotonic()
        self._end, self._line = self._start + limit, self._start + FIRST_LINE

    @property
    def waited(self) -> timedelta:
        """So far, in whole seconds."""
        return timedelta(seconds=round(time.monotonic() - self._start))

    def goes_on(self, what: Callable[[], str]) -> bool:
        """Waits a moment; False once the time is over. Now and then it prints `what()`."""
        now = time.monotonic()
        if now >= self._end:
            return False
        if now >= self._line:
            self._line = now + NEXT_LINE
            warn(f"accel launch: {what()}")
        time.sleep(_POLL)
        return True


class Pulse:
    """Watches the signs of life of others."""

    def __init__(self, store: TCPStore) -> None:
        self._store = store
        self._last: dict[str, tuple[int, float]] = {}

    def is_silent(self, identity: str) -> bool:
        """Whether it has given none for `SILENCE`, as seen from the calls of this method."""
        count, now = self._store.add(beats(identity), 0), time.monotonic()
        last, since = self._last.get(identity, (-1, now))
        if count != last:
            self._last[identity] = count, now
            return False
        return now - since > SILENCE


def lives(store: TCPStore, identity: str) -> bool:
    """Whether this machine gives a sign of life: at once if it does, within `SILENCE` if not."""
    first, wait = store.add(beats(identity), 0), Waiting(SILENCE)
    while wait.goes_on(str):
        if store.add(beats(identity), 0) != first:
            return True
    return False


def end(store: TCPStore, reason: str, *, begun: bool) -> None:
    """Ends the run on all machines, which say `reason`. The first reason counts; a run that has begun ends if `begun`."""
    found = store.compare_set(PHASE, "", ENDED + reason).decode()
    if begun and found == BEGUN:
        store.compare_set(PHASE, BEGUN, ENDED + reason)


def refuse(store: TCPStore, reason: str) -> NoReturn:
    """Raises `MeetingError`; on all machines that have come, unless the run has begun."""
    end(store, reason, begun=False)
    raise MeetingError(reason + (" The run that had begun goes on." if phase(store) == BEGUN else ""))


def phase(store: TCPStore) -> str:
    """What has become of the run."""
    return str(store.get(PHASE).decode()) if store.check([PHASE]) else ""


def cards(store: TCPStore, machines: int) -> dict[int, Card | None]:
    """The cards of all machines; None for those that have not come."""
    return {
        rank: Card(**json.loads(store.get(owner(rank)))) if store.check([owner(rank)]) else None
        for rank in range(machines)
    }


def connect(address: Address) -> TCPStore:
    """A connection to the store there. Raises `OSError` or `DistError` if there is none."""
    # torch's own attempts take as long as they may; where a program listens that never answers, for ever, and no signal is heard.
    with socket.create_connection(address, timeout=CONNECT.total_seconds()):
        pass
    found: list[TCPStore | DistError] = []

    def connect() -> None:
        try:
            found.append(TCPStore(*address, is_master=False, wait_for_workers=False, timeout=CONNECT))
        except DistError as error:
            found.append(error)

    thread = threading.Thread(target=connect, name="accel-connect", daemon=True)
    thread.start()
    thread.join(_ANSWER)
    answer = found[0] if found else TimeoutError("what listens there does not answer as a store")
    if isinstance(answer, Exception):
        raise answer
    return answer


def owner(rank: int) -> str:
    """The key of the card of the machine that has a rank."""
    return f"machine/{rank}"


def beats(identity: str) -> str:
    """The key of the number of signs of life."""
    return f"beats/{identity}"


def capital(card: Card) -> str:
    """The card in words, as a sentence begins with it."""
    return f"M{str(card)[1:]}"


def listed(ranks: list[int]) -> str:
    """Machines in words."""
    return f"machine{'' if len(ranks) == 1 else 's'} {', '.join(map(str, ranks))}"
