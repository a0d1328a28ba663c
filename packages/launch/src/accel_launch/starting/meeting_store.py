"""Machine 0's store, at which machines meet: who has come, who lives, the phase of the run.

Before they meet, each machine finds the store and claims its rank there.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, NoReturn

from torch.distributed import DistError, TCPStore
from torch.distributed.elastic.rendezvous import RendezvousError

from accel_launch.output import warn
from accel_launch.starting.interfaces import own_addresses

if TYPE_CHECKING:
    from accel_launch.starting.meeting_point import Address

SILENCE = 3.0
"""Seconds without a sign of life after which another may have a machine's rank."""

FIRST_LINE, NEXT_LINE = 5.0, 60.0
"""Seconds after which a line says what is waited for, and between two such lines."""

_CONNECT = timedelta(seconds=10)  # of one attempt to connect: a busy machine may stand still for some of them
_POLL = 0.05
_ANSWER = 10.0  # seconds in which what listens there has to answer as a store

OPENED, FINISHED, STOPPED, LEFT = "opened", "finished", "stopped", "left"
"""Keys: who opened the store; before the identity of a card, that this launcher's processes have ended well, the signal by which it
was told to stop, and that it needs the store no more."""

PHASE, BEGUN, ENDED = "phase", "begun", "ended: "
"""The key of what has become of the run, and its values: empty while machines gather, begun, or ended with the reason."""


class MeetingError(RendezvousError):
    """The machines of a run do not meet, or one is gone: says who, where, and what to do."""


@dataclass(frozen=True)
class Card:
    """The description of a machine that the others read."""

    rank: int  # of the machine
    machines: int  # this and the next two: what it was told about the whole run
    processes: int
    restarts: int = 0
    host: str = field(default_factory=socket.gethostname)
    pid: int = field(default_factory=os.getpid)
    identity: str = field(default_factory=lambda: uuid.uuid4().hex)  # of this start of the launcher

    def __str__(self) -> str:
        return f"machine {self.rank} ({self.host}, process {self.pid})"


class Waiting:
    """A wait of at most `limit` seconds, which says now and then what for."""

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

    def __init__(self, store: TCPStore, silence: float) -> None:
        self._store, self._silence = store, silence
        self._last: dict[str, tuple[int, float]] = {}

    def is_silent(self, card: Card) -> bool:
        """Whether a machine has given none for `silence` seconds, as seen from the calls of this method."""
        count, now = self._store.add(beats(card), 0), time.monotonic()
        last, since = self._last.get(card.identity, (-1, now))
        if count != last:
            self._last[card.identity] = count, now
            return False
        return now - since > self._silence


def open_store(address: Address, card: Card) -> TCPStore:
    """Opens the store here, and checks that others find it; else returns another machine 0's."""
    own, taken = None, None
    try:
        own = TCPStore("127.0.0.1", address.port, is_master=True, wait_for_workers=False, timeout=_CONNECT)
        own.set(OPENED, card.identity)
    except DistError as error:
        taken = error
    try:
        found = _connect(address)
    except (DistError, OSError) as error:
        if taken is not None:
            raise MeetingError(
                f"Machine 0 was to open port {address.port} for the machines to meet at {address}, and it is taken by "
                f"another program. Give all machines another main_process_port, or end what uses this one."
            ) from taken
        raise MeetingError(
            f"Machine 0 was to be met at {address}, but this machine, which is machine 0, does not reach itself there: "
            f"{error}. Found these addresses of this machine: {', '.join(own_addresses()) or 'none'}. Give the one that "
            "the other machines reach as main_process_ip, the same on every machine; or another machine_rank."
        ) from error
    if own is not None and found.check([OPENED]) and found.get(OPENED).decode() == card.identity:
        return own
    return found


def find_store(address: Address, card: Card, wait: Waiting) -> TCPStore:
    """The store of this run, and not of an earlier one, which is about to close."""
    while True:
        try:
            store = _connect(address)
            problem = "" if store.check([OPENED]) else "a store answers there that no machine 0 has opened"
            if not problem and phase(store).startswith(ENDED):
                problem = phase(store).removeprefix(ENDED).splitlines()[0]
            before = None if problem else cards(store, card.rank + 1)[card.rank]
            if before is not None and store.check([f"{FINISHED}/{before.identity}"]):
                problem = f"machine {card.rank} has finished"
            if not problem:
                return store
        except (DistError, OSError) as error:
            problem = str(error).splitlines()[0]
        if not wait.goes_on(lambda: f"waiting for machine 0 to open {address} ({problem})"):  # noqa: B023
            raise MeetingError(
                f"{capital(card)} was to meet {card.machines - 1} others at {address}. It waited {wait.waited}, and "
                f"machine 0 did not open this meeting point: {problem}. Check that accel launch runs on machine 0, with "
                "machine_rank 0; that main_process_ip and main_process_port are the same on every machine; and that no "
                "firewall closes this port and those above 1024."
            )


def claim(store: TCPStore, card: Card) -> None:
    """Claims the rank of this machine. Raises `MeetingError` if another has it, and lives."""
    mine = json.dumps(asdict(card))
    found = store.compare_set(owner(card.rank), "", mine).decode()
    while found != mine:
        other = Card(**json.loads(found))
        if _lives(store, other) or (phase(store) == BEGUN and not card.restarts):
            _refuse(
                store,
                f"Machine rank {card.rank} of {card.machines} was claimed twice: by {other} and by {card.host}, process {card.pid}. "
                f"Give each machine a machine_rank of its own, from 0 to {card.machines - 1}, and each run a main_process_port of "
                f"its own; where a machine that was lost may come back, give all of them --max-restarts.",
            )
        found = store.compare_set(owner(card.rank), found, mine).decode()


def compare_numbers(store: TCPStore, card: Card) -> None:
    """Raises `MeetingError` if numbers are not machine 0's; on all, if the run has not begun."""
    first = Card(**json.loads(store.get(owner(0))))
    if (first.machines, first.processes, first.restarts) == (card.machines, card.processes, card.restarts):
        return
    rows = [
        f"  {each.rank:>7}  {each.machines:>12}  {each.processes:>13}  {each.restarts:>12}  {each.host}, process {each.pid}\n"
        for each in cards(store, max(first.machines, card.machines)).values()
        if each is not None
    ]
    _refuse(
        store,
        f"The machines of a run were told different numbers:\n  machine  num_machines  num_processes  max_restarts  who\n{''.join(rows)}"
        f"Give all machines the same num_machines, num_processes and max_restarts, those of the whole run.",
    )


def end(store: TCPStore, reason: str, *, begun: bool) -> None:
    """Ends the run on all machines for `reason`, if the first; a begun run only if `begun`."""
    found = store.compare_set(PHASE, "", ENDED + reason).decode()
    if begun and found == BEGUN:
        store.compare_set(PHASE, BEGUN, ENDED + reason)


def phase(store: TCPStore) -> str:
    """The phase of the run: empty, `BEGUN`, or `ENDED` and the reason."""
    return str(store.get(PHASE).decode()) if store.check([PHASE]) else ""


def cards(store: TCPStore, machines: int) -> dict[int, Card | None]:
    """The cards of all machines; None for those that have not come."""
    keys = {rank: owner(rank) for rank in range(machines)}
    return {rank: Card(**json.loads(store.get(key))) if store.check([key]) else None for rank, key in keys.items()}


def owner(rank: int) -> str:
    """The key of the card of the machine that has a rank."""
    return f"machine/{rank}"


def beats(card: Card) -> str:
    """The key of the number of signs of life."""
    return f"beats/{card.identity}"


def capital(card: Card) -> str:
    """The card in words, as a sentence begins with it."""
    return f"M{str(card)[1:]}"


def listed(ranks: list[int]) -> str:
    """Machines in words."""
    return f"machine{'' if len(ranks) == 1 else 's'} {', '.join(map(str, ranks))}"


def _refuse(store: TCPStore, reason: str) -> NoReturn:
    """Raises `MeetingError`; on all machines that have come, unless the run has begun."""
    end(store, reason, begun=False)
    raise MeetingError(reason + (" The run that had begun goes on." if phase(store) == BEGUN else ""))


def _lives(store: TCPStore, card: Card) -> bool:
    """Whether this machine gives a sign of life: at once if it does, within `SILENCE` if not."""
    first, wait = store.add(beats(card), 0), Waiting(SILENCE)
    while wait.goes_on(str):
        if store.add(beats(card), 0) != first:
            return True
    return False


def _connect(address: Address) -> TCPStore:
    """A connection to the store there. Raises `OSError` or `DistError` if there is none."""
    # torch's own attempts take as long as they may; where a program listens that never answers, for ever, and no signal is heard.
    with socket.create_connection(address, timeout=_CONNECT.total_seconds()):
        pass
    found: list[TCPStore | DistError] = []

    def connect() -> None:
        try:
            found.append(TCPStore(*address, is_master=False, wait_for_workers=False, timeout=_CONNECT))
        except DistError as error:
            found.append(error)

    thread = threading.Thread(target=connect, name="accel-connect", daemon=True)
    thread.start()
    thread.join(_ANSWER)
    answer = found[0] if found else TimeoutError("what listens there does not answer as a store")
    if isinstance(answer, Exception):
        raise answer
    return answer
