"""How the machines of a run meet: each claims its rank at a store that machine 0 keeps, and torch gives out the ranks of processes.

torch's `static` rendezvous believes every machine: two with one rank, or with different numbers,
wait for each other until the timeout. So machines check in first, and everyone learns at once why a
run cannot begin. A run without restarts is torch's `static` from there on: machine r has the ranks
that its number says, and its processes use the same store. With restarts, the rounds are those of
torch's `c10d`, at the same store.

A thread of each launcher gives signs of life and hears why the run has ended elsewhere, so that the
main thread never waits for the network.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import NamedTuple, NoReturn

from torch.distributed import DistError, PrefixStore, TCPStore
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import (
    RendezvousError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
)

from accel_core.api.launcher import loopback_listener
from accel_launch.output import warn
from accel_launch.starting.interfaces import own_addresses

BEAT, SILENCE, LOST = 0.5, 3.0, 30.0
"""Seconds between signs of life; without one, after which a machine is gone; without an answer, after which the store is."""

FIRST_LINE, NEXT_LINE = 5.0, 60.0
"""Seconds after which a line says what is waited for, and between two such lines."""

_POLL = 0.05
_CONNECT = timedelta(seconds=2)  # one attempt to connect
_ANSWER = 10.0  # seconds in which what listens there has to answer as a store
_STORE = timedelta(minutes=1)  # the messages of torch's agents once all machines are there
_LAST_WORDS = 5.0  # seconds for which machine 0 keeps the store of a run that failed, so that the others hear why
_OPENED, _PHASE, _FINISHED, _LEFT = "opened", "phase", "finished", "left"
_BEGUN, _ENDED = "begun", "ended: "  # the values of _PHASE, which is empty while machines gather


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


class _StaticRendezvous(RendezvousHandler):
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


class OneMachine(_StaticRendezvous):
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


class Machines(_StaticRendezvous):
    """The rendezvous of several machines, of which this is the one with `card`.

    Args:
        address: where machine 0 keeps the store.
        card: who this machine is.
        timeout: how long it waits for the others, each time.
        local_addr: the address by which the others reach this machine; None: its host name.
    """

    def __init__(self, address: Address, card: Card, timeout: timedelta, local_addr: str | None = None) -> None:
        self._address, self._card, self._timeout, self._local_addr = address, card, timeout, local_addr
        self._store: TCPStore | None = None
        self._rounds: RendezvousHandler | None = None
        self._finished = self._met = False
        self._problem: MeetingError | None = None
        self._answered = time.monotonic()
        self._end = threading.Event()
        self._heart = threading.Thread(target=self._beat_on, name="accel-heartbeat", daemon=True)

    @property
    def use_agent_store(self) -> bool:
        """Whether the ranks use the launchers' store; with restarts, which machines count for themselves, a new one each time."""
        return not self._card.restarts

    def next_rendezvous(self) -> RendezvousInfo:
        """Returns when all machines are there.

        Raises:
            MeetingError: somebody does not come in time or never will, a rank is claimed twice, or
                machines were told different numbers.
        """
        try:
            if self._store is None:
                self._check_in(Waiting(self._timeout.total_seconds()))
            return self._next_round()
        except DistError as error:
            raise self._lost(str(error).splitlines()[0]) from error

    def num_nodes_waiting(self) -> int:
        """The number of machines that wait for another round.

        Raises:
            MeetingError: the run has ended on another machine, or machine 0 is gone.
        """
        self._check()
        return 0 if self._rounds is None else self._rounds.num_nodes_waiting()

    def finish(self) -> None:
        """Says that the processes of this machine have ended well, and waits until those of the others have.

        Raises:
            MeetingError: the run has failed on another machine.
        """
        assert self._store is not None, "the machines have met"
        self._finished = True
        store, pulse = self._store, _Pulse(self._store)
        store.set(f"{_FINISHED}/{self._card.rank}", "")
        wait = Waiting(float("inf"))
        while rest := [each.rank for each in self._others(store, _FINISHED) if not pulse.is_silent(each.identity)]:
            try:
                self._check()
            except MeetingError as error:
                raise MeetingError(f"The processes of machine {self._card.rank} have finished, but: {error}") from error
            wait.goes_on(lambda: f"this machine has finished, and waits for {_machines(rest)}")

    def shutdown(self) -> bool:
        """This machine ends for good: well if it has finished, else as failed, because of the exception on its way."""
        store, self._store = self._store, None
        if store is None:
            return True
        try:
            with contextlib.suppress(DistError):  # machine 0 is gone: nobody is left to be told
                if time.monotonic() - self._answered < LOST:
                    self._leave(store, sys.exc_info()[1])
        finally:
            self._stop()
        return True

    def _leave(self, store: TCPStore, error: BaseException | None) -> None:
        if not self._finished:
            reason = str(error) if isinstance(error, MeetingError) else self._failure(error)
            _end(store, reason, begun=self._met)  # who has met nobody ends no run of others
            if self._rounds is not None:
                self._rounds.shutdown()
        store.set(f"{_LEFT}/{self._card.rank}", "")
        pulse, wait = _Pulse(store), Waiting(_LAST_WORDS)
        while self._card.rank == 0 and wait.goes_on(str):
            if all(pulse.is_silent(each.identity) for each in self._others(store, _LEFT)):
                break

    def _failure(self, error: BaseException | None) -> str:
        how = "its processes have failed" if error is None else f"{type(error).__name__}: {error}"
        if isinstance(error, ChildFailedError):
            rank, failure = error.get_first_failure()
            code = failure.exitcode
            how = f"rank {rank} was ended {f'with status {code}' if code >= 0 else f'by {failure.signal_name()}'}"
        return (
            f"{_capital(self._card)} has failed and does not come back: {how}. Look at what it printed. To go on after failures, from "
            f"a checkpoint: --max-restarts, the same on all machines."
        )

    def _next_round(self) -> RendezvousInfo:
        card, store = self._card, self._store
        assert store is not None, "this machine has checked in"
        self._check()
        done = card.machines - 1 - len(self._others(store, _FINISHED))
        if done:
            raise MeetingError(
                f"Machine {card.rank} of {card.machines} came to {self._address} to start its processes again, but those of {done} of "
                f"the machines have finished already, so that nobody is left to train with. Look at what failed here at the end of "
                f"the run; start all machines again to go on from a checkpoint."
            )
        if not card.restarts:
            meeting_point = RendezvousStoreInfo(*self._address)
            return RendezvousInfo(PrefixStore("agents", store), card.rank, card.machines, meeting_point)
        self._rounds = self._rounds or self._elastic(store)
        try:
            return self._rounds.next_rendezvous()
        except RendezvousError:
            self._check()  # which says why, if it is because of another machine
            raise

    def _elastic(self, store: TCPStore) -> RendezvousHandler:
        """torch's rounds, in which a machine may come back."""
        from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
        from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
            DynamicRendezvousHandler,
            RendezvousTimeout,
        )

        machines = self._card.machines
        handler: RendezvousHandler = DynamicRendezvousHandler.from_backend(
            self.get_run_id(),
            PrefixStore("agents", store),
            C10dRendezvousBackend(store, self.get_run_id()),
            machines,
            machines,
            self._local_addr,
            RendezvousTimeout(join=self._timeout),
            keep_alive_interval=1,
            keep_alive_max_attempt=5,
        )
        return handler

    def _check_in(self, wait: Waiting) -> None:
        """Finds the store, claims the rank of this machine there, and waits until all have done so."""
        card = self._card
        store = self._open() if card.rank == 0 else self._find(wait)
        store.set_timeout(_STORE)
        self._claim(store)
        self._store = store
        self._beat(store)
        self._heart.start()
        atexit.register(self._stop)  # a thread that torch wakes up in an interpreter that ends takes the process down
        self._compare_numbers(store)
        pulse = _Pulse(store)
        while not _phase(store).startswith(_BEGUN):
            self._check()
            missing = [
                rank
                for rank, each in _cards(store, card.machines).items()
                if each is None or pulse.is_silent(each.identity)
            ]
            if card.rank == 0 and not missing:
                store.compare_set(_PHASE, "", _BEGUN)
            elif not wait.goes_on(lambda: self._waiting(missing)):  # noqa: B023
                raise MeetingError(
                    f"After {wait.waited} this machine was still {self._waiting(missing)}. Check that accel launch runs on each of them, "
                    f"with its own machine_rank and the same main_process_ip and main_process_port; a machine that needs longer to come "
                    f"is waited for with a longer meeting_timeout."
                )
        self._met = True

    def _waiting(self, missing: list[int]) -> str:
        return f"waiting for {_machines(missing)} of {self._card.machines} at {self._address}"

    def _open(self) -> TCPStore:
        """Opens the store on this machine, and makes sure that it is what the others find; else that of another machine 0."""
        own, taken = None, None
        try:
            own = TCPStore("127.0.0.1", self._address.port, is_master=True, wait_for_workers=False, timeout=_CONNECT)
            own.set(_OPENED, self._card.identity)
        except DistError as error:
            taken = error
        try:
            found = _connect(self._address)
        except (DistError, OSError) as error:
            if taken is not None:
                raise MeetingError(
                    f"Machine 0 was to open port {self._address.port} for the machines to meet at {self._address}, and it is taken by "
                    f"another program. Give all machines another main_process_port, or end what uses this one."
                ) from taken
            raise MeetingError(
                f"Machine 0 was to be met at {self._address}, but this machine, which is machine 0, does not reach itself there: {error}. "
                f"Found these addresses of this machine: {', '.join(own_addresses()) or 'none'}. Give the one that the other machines "
                f"reach as main_process_ip, the same on every machine; or give this machine another machine_rank."
            ) from error
        if own is not None and found.check([_OPENED]) and found.get(_OPENED).decode() == self._card.identity:
            return own
        return found

    def _find(self, wait: Waiting) -> TCPStore:
        """The store of this run, and not of an earlier one, which is about to close."""
        while True:
            try:
                store = _connect(self._address)
                problem = "" if store.check([_OPENED]) else "a store answers there that no machine 0 has opened"
                if not problem and _phase(store).startswith(_ENDED):
                    problem = _phase(store).removeprefix(_ENDED).splitlines()[0]
                if not problem and store.check([f"{_FINISHED}/{self._card.rank}"]):
                    problem = f"machine {self._card.rank} has finished"
                if not problem:
                    return store
            except (DistError, OSError) as error:
                problem = str(error).splitlines()[0]
            if not wait.goes_on(lambda: f"waiting for machine 0 to open {self._address} ({problem})"):  # noqa: B023
                raise MeetingError(
                    f"{_capital(self._card)} was to meet {self._card.machines - 1} others at {self._address}. It waited {wait.waited}, and "
                    f"machine 0 did not open this meeting point: {problem}. Check that accel launch runs on machine 0, with machine_rank "
                    f"0; that main_process_ip and main_process_port are the same on every machine; and that no firewall closes this "
                    f"port and those above 1024 between them."
                )

    def _claim(self, store: TCPStore) -> None:
        """Makes the rank of this machine its own. Raises `MeetingError` if another machine has it, and lives."""
        card, mine = self._card, json.dumps(asdict(self._card))
        found = store.compare_set(_owner(card.rank), "", mine).decode()
        while found != mine:
            owner = Card(**json.loads(found))
            if _lives(store, owner.identity) or (_phase(store) == _BEGUN and not card.restarts):
                self._refuse(
                    store,
                    f"Machine rank {card.rank} of {card.machines} was claimed twice: by {owner} and by {card.host}, process {card.pid}. "
                    f"Give each machine a machine_rank of its own, from 0 to {card.machines - 1}, and each run a main_process_port of "
                    f"its own; where a machine that was lost may come back, give all of them --max-restarts.",
                )
            found = store.compare_set(_owner(card.rank), found, mine).decode()

    def _compare_numbers(self, store: TCPStore) -> None:
        first = Card(**json.loads(store.get(_owner(0))))
        if first.numbers == self._card.numbers:
            return
        came = [each for each in _cards(store, max(first.machines, self._card.machines)).values() if each is not None]
        rows = [
            f"  {each.rank:>7}  {each.machines:>12}  {each.processes:>13}  {each.restarts:>12}  {each.host}, process {each.pid}"
            for each in came
        ]
        self._refuse(
            store,
            "\n".join(
                [
                    "The machines of a run were told different numbers:",
                    "  machine  num_machines  num_processes  max_restarts  who",
                    *rows,
                    "Give all machines the same num_machines, num_processes and max_restarts, those of the whole run.",
                ]
            ),
        )

    def _refuse(self, store: TCPStore, reason: str) -> NoReturn:
        """Raises `MeetingError`; on all machines that have come, unless the run has begun."""
        _end(store, reason, begun=False)
        raise MeetingError(reason + (" The run that had begun goes on." if _phase(store) == _BEGUN else ""))

    def _others(self, store: TCPStore, without: str) -> list[Card]:
        """The other machines that have not said `without`."""
        return [
            each
            for rank, each in _cards(store, self._card.machines).items()
            if each is not None and rank != self._card.rank and not store.check([f"{without}/{rank}"])
        ]

    def _check(self) -> None:
        """Raises `MeetingError` if the run has ended elsewhere, machine 0 is gone, or another machine has this rank."""
        if self._problem is not None:
            raise self._problem
        silent = time.monotonic() - self._answered
        if self._heart.is_alive() and silent > LOST:
            raise self._lost(f"no answer for {silent:.0f} s")

    def _lost(self, reason: str) -> MeetingError:
        return self._problem or MeetingError(
            f"{_capital(self._card)} was in a run of {self._card.machines} machines that meet at {self._address}, but machine 0, which "
            f"keeps the meeting point, is gone: {reason}. Look at the output of machine 0; then start all machines again: without "
            f"machine 0 the others cannot go on."
        )

    def _beat_on(self) -> None:
        store = self._store
        assert store is not None, "the thread starts with one"
        try:
            mine = store.clone()  # a connection of its own: one that waits lets nobody else through
            while self._problem is None and not self._end.wait(BEAT):
                self._beat(mine)
        except (DistError, OSError) as error:
            self._problem = self._lost(str(error).splitlines()[0])

    def _beat(self, store: TCPStore) -> None:
        store.add(_beats(self._card.identity), 1)
        phase = _phase(store)
        if phase.startswith(_ENDED):
            self._problem = MeetingError(phase.removeprefix(_ENDED))
        self._answered = time.monotonic()

    def _stop(self) -> None:
        """No sign of life from now on."""
        self._end.set()
        if self._heart.is_alive():
            self._heart.join(2 * BEAT)
        atexit.unregister(self._stop)


class _Pulse:
    """Watches the signs of life of others."""

    def __init__(self, store: TCPStore) -> None:
        self._store = store
        self._last: dict[str, tuple[int, float]] = {}

    def is_silent(self, identity: str) -> bool:
        """Whether it has given none for `SILENCE`, as seen from the calls of this method."""
        count, now = self._store.add(_beats(identity), 0), time.monotonic()
        last, since = self._last.get(identity, (-1, now))
        if count != last:
            self._last[identity] = count, now
            return False
        return now - since > SILENCE


def _lives(store: TCPStore, identity: str) -> bool:
    """Whether this machine gives a sign of life: at once if it does, within `SILENCE` if not."""
    first, wait = store.add(_beats(identity), 0), Waiting(SILENCE)
    while wait.goes_on(str):
        if store.add(_beats(identity), 0) != first:
            return True
    return False


def _end(store: TCPStore, reason: str, *, begun: bool) -> None:
    """Ends the run on all machines, which say `reason`. The first reason counts; a run that has begun ends if `begun`."""
    found = store.compare_set(_PHASE, "", _ENDED + reason).decode()
    if begun and found == _BEGUN:
        store.compare_set(_PHASE, _BEGUN, _ENDED + reason)


def _phase(store: TCPStore) -> str:
    return str(store.get(_PHASE).decode()) if store.check([_PHASE]) else ""


def _cards(store: TCPStore, machines: int) -> dict[int, Card | None]:
    """The cards of all machines; None for those that have not come."""
    return {
        rank: Card(**json.loads(store.get(_owner(rank)))) if store.check([_owner(rank)]) else None
        for rank in range(machines)
    }


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


def _owner(rank: int) -> str:
    return f"machine/{rank}"


def _beats(identity: str) -> str:
    return f"beats/{identity}"


def _capital(card: Card) -> str:
    return f"M{str(card)[1:]}"


def _machines(ranks: list[int]) -> str:
    return f"machine{'' if len(ranks) == 1 else 's'} {', '.join(map(str, ranks))}"
