"""The meeting of machines: each claims its rank at machine 0's store; torch ranks the processes.

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
import math
import signal
import sys
import threading
import time
from datetime import timedelta
from typing import TYPE_CHECKING

from torch.distributed import DistError, PrefixStore, TCPStore
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from accel_core.api.launcher import loopback_listener
from accel_launch.output import warn
from accel_launch.starting import meeting_store
from accel_launch.starting.meeting_store import ENDED, FINISHED, LEFT, STOPPED, MeetingError, Pulse, Waiting, cards

if TYPE_CHECKING:
    from accel_launch.starting.meeting_point import Address
    from accel_launch.starting.meeting_store import Card

BEAT, LOST = 0.5, 30.0
"""Seconds between signs of life; and without one, after which another machine is gone, or the store."""

_STORE = timedelta(minutes=1)  # the messages of torch's agents once all machines are there
_LAST_WORDS = 5.0  # seconds for which machine 0 keeps the store of a run that failed, so that the others hear why


class _StaticRendezvous(RendezvousHandler):
    """The parts of torch's protocol that a rendezvous without rounds of its own does not need."""

    def get_backend(self) -> str:
        return "static"

    def get_run_id(self) -> str:
        return "accel"

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """Does nothing: the store ends with the launcher."""


class OneMachine(_StaticRendezvous):
    """The rendezvous of one machine: torch's `static`, at a free port, on loopback if possible.

    Raises `DistError` if the port is not free.
    """

    use_agent_store = True

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

    def next_rendezvous(self) -> RendezvousInfo:
        """See base class."""
        meeting_point = RendezvousStoreInfo(self._store.host, self._store.port)
        return RendezvousInfo(PrefixStore("agents", self._store), 0, 1, meeting_point)

    def num_nodes_waiting(self) -> int:
        """None, ever."""
        return 0

    def shutdown(self) -> bool:
        """See base class."""
        return True


class Machines(_StaticRendezvous):
    """The rendezvous of several machines, for that with `card`; machine 0's store is at `address`.

    Each time it waits `timeout` for the others. They reach it by `local_addr`; None: its host name.
    """

    def __init__(self, address: Address, card: Card, timeout: timedelta, local_addr: str | None = None) -> None:
        self._address, self._card, self._timeout, self._local_addr = address, card, timeout, local_addr
        self._store: TCPStore | None = None
        self._rounds: RendezvousHandler | None = None
        self._finished = self._met = False
        self._stop_signal = 0
        self._last_words = _LAST_WORDS
        self._problem: MeetingError | None = None
        self._asked = math.inf  # when the store was asked for the answer that is waited for
        self._end = threading.Event()
        self._heart: threading.Thread | None = None

    @property
    def use_agent_store(self) -> bool:
        """Whether the ranks use the launchers' store; with restarts, each round has a new one."""
        return not self._card.restarts

    def next_rendezvous(self) -> RendezvousInfo:
        """Returns when all machines are there.

        Raises `MeetingError` if somebody does not come in time or never will, two claim a rank, or
        machines were told different numbers.
        """
        try:
            if self._store is None:
                self._check_in(Waiting(self._timeout.total_seconds()))
            return self._next_round()
        except DistError as error:
            raise self._lost(str(error).splitlines()[0]) from error

    def num_nodes_waiting(self) -> int:
        """The number of machines that wait for a new round; `MeetingError` if the run ended."""
        self._check()
        return 0 if self._rounds is None else self._rounds.num_nodes_waiting()

    def finish(self) -> int:
        """Reports success here, and waits for the others. Returns the signal that stopped one, or 0.

        Raises `MeetingError` if one fails, or is gone without a word.
        """
        store = self._store
        assert store is not None, "the machines have met"
        self._finished = True
        try:
            store.set(f"{FINISHED}/{self._card.identity}", "")
            self._wait_for_others(store)
        except (MeetingError, DistError) as error:
            why = error if isinstance(error, MeetingError) else self._lost(str(error).splitlines()[0])
            raise MeetingError(f"The processes of machine {self._card.rank} have finished, but: {why}") from error
        self._last_words = LOST  # one that stands still is to hear that all have finished
        for other in self._others(store):
            if store.check([key := f"{STOPPED}/{other.identity}"]):
                number = signal.Signals(int(store.get(key)))
                warn(
                    f"accel launch: {other} was told to stop by {number.name}, which stopped the run. This machine's "
                    f"processes have finished; its exit status is {128 + number}, so that all machines are started again."
                )
                return number
        return 0

    def stop(self, number: int, patience: float) -> None:
        """Tells the others that a signal stopped this machine; machine 0 stays `patience` for them."""
        if self._met:
            self._stop_signal, self._last_words = number, max(patience, _LAST_WORDS)
            self.shutdown()

    def shutdown(self) -> bool:
        """Ends this machine's part: well if finished, else as failed by the current exception."""
        store, self._store = self._store, None
        if store is None:
            return True
        try:
            with contextlib.suppress(DistError):  # machine 0 is gone: nobody is left to be told
                if time.monotonic() - self._asked < LOST:
                    self._leave(store, sys.exc_info()[1])
        finally:
            self._stop()
        return True

    def _leave(self, store: TCPStore, error: BaseException | None) -> None:
        if self._stop_signal:
            store.set(f"{STOPPED}/{self._card.identity}", str(int(self._stop_signal)))
        elif not self._finished:
            reason = str(error) if isinstance(error, MeetingError) else self._failure(error)
            meeting_store.end(store, reason, begun=self._met)  # who has met nobody ends no run of others
            if self._rounds is not None:
                self._rounds.shutdown()
        store.set(f"{LEFT}/{self._card.identity}", "")
        wait = Waiting(self._last_words)
        while self._card.rank == 0 and (rest := self._others(store, LEFT)):
            ranks = meeting_store.listed([each.rank for each in rest])
            if not wait.goes_on(lambda: f"this machine has ended, and keeps the meeting point for {ranks}"):  # noqa: B023
                break

    def _wait_for_others(self, store: TCPStore) -> None:
        """Returns when all have finished, or said that they were told to stop."""
        pulse, wait = Pulse(store, LOST), Waiting(float("inf"))
        while rest := [each.rank for each in self._others(store, FINISHED, STOPPED) if not pulse.is_silent(each)]:
            self._check()
            if self._rounds is not None and self._rounds.num_nodes_waiting():
                reason = (
                    f"Another machine is to start its processes again, but those of {self._card} have finished already. Look at "
                    "what failed there; start all machines again to go on from a checkpoint."
                )
                meeting_store.end(store, reason, begun=True)
                self._rounds.shutdown()  # which ends the wait of that machine
                raise MeetingError(reason)
            wait.goes_on(lambda: f"this machine has finished, and waits for {meeting_store.listed(rest)}")
        if gone := self._others(store, FINISHED, STOPPED):
            raise MeetingError(
                f"{' and '.join(map(meeting_store.capital, gone))} gave no sign of life for {LOST:g} s, and had not finished. Look "
                "at the output there; start all machines again to go on from a checkpoint."
            )

    def _failure(self, error: BaseException | None) -> str:
        how = "its processes have failed" if error is None else f"{type(error).__name__}: {error}"
        if isinstance(error, ChildFailedError):
            rank, failure = error.get_first_failure()
            code = failure.exitcode
            how = f"rank {rank} was ended {f'with status {code}' if code >= 0 else f'by {failure.signal_name()}'}"
        return (
            f"{meeting_store.capital(self._card)} has failed and does not come back: {how}. Look at what it printed. To "
            "go on after failures, from a checkpoint: --max-restarts, the same on all machines."
        )

    def _next_round(self) -> RendezvousInfo:
        card, store = self._card, self._store
        assert store is not None, "this machine has checked in"
        self._check()
        if done := card.machines - 1 - len(self._others(store, FINISHED)):
            raise MeetingError(
                f"Machine {card.rank} of {card.machines} came to {self._address} to start its processes again, but "
                f"those of {done} of the machines have finished already. Look at what failed here; start all machines "
                "again to go on from a checkpoint."
            )
        if not card.restarts:
            meeting_point = RendezvousStoreInfo(*self._address)
            return RendezvousInfo(PrefixStore("agents", store), card.rank, card.machines, meeting_point)
        self._rounds = self._rounds or self._elastic(store)
        try:
            return self._rounds.next_rendezvous()
        except RendezvousError as error:
            self._beat(store)
            self._check()  # which says why, if it is because of another machine
            raise MeetingError(
                f"{meeting_store.capital(card)} was to start its processes, and waited {self._timeout} for the other "
                f"machines, which did not come ({type(error).__name__}). Look at their output; start all machines again to "
                "go on from a checkpoint."
            ) from error

    def _elastic(self, store: TCPStore) -> RendezvousHandler:
        """torch's rounds, in which a machine may come back."""
        from torch.distributed.elastic.rendezvous import c10d_rendezvous_backend, dynamic_rendezvous

        machines = self._card.machines
        handler: RendezvousHandler = dynamic_rendezvous.DynamicRendezvousHandler.from_backend(
            self.get_run_id(),
            PrefixStore("agents", store),
            c10d_rendezvous_backend.C10dRendezvousBackend(store, self.get_run_id()),
            machines,
            machines,
            self._local_addr,
            dynamic_rendezvous.RendezvousTimeout(join=self._timeout),
            keep_alive_interval=1,
            keep_alive_max_attempt=5,
        )
        return handler

    def _check_in(self, wait: Waiting) -> None:
        """Finds the store, claims this machine's rank there, and waits until all have done so."""
        card, address = self._card, self._address
        is_first = card.rank == 0
        store = meeting_store.open_store(address, card) if is_first else meeting_store.find_store(address, card, wait)
        store.set_timeout(_STORE)
        meeting_store.claim(store, card)
        self._store = store
        self._beat(store)
        mine = store.clone()  # type: ignore[attr-defined]  # a connection of its own: one that waits lets nobody else through
        self._heart = threading.Thread(target=self._beat_on, args=(mine,), name="accel-heartbeat", daemon=True)
        self._heart.start()
        atexit.register(self._stop)  # a thread that torch wakes up in an interpreter that ends takes the process down
        meeting_store.compare_numbers(store, card)
        pulse = Pulse(store, meeting_store.SILENCE)
        while not meeting_store.phase(store).startswith(meeting_store.BEGUN):
            self._check()
            come = cards(store, card.machines)
            missing = [rank for rank, each in come.items() if each is None or pulse.is_silent(each)]
            about = f"waiting for {meeting_store.listed(missing)} of {card.machines} at {address}"
            if is_first and not missing:
                store.compare_set(meeting_store.PHASE, "", meeting_store.BEGUN)
            elif not wait.goes_on(lambda: about):  # noqa: B023
                raise MeetingError(
                    f"After {wait.waited} this machine was still {about}. Check that accel launch runs on each of them, "
                    "with its own machine_rank and the same main_process_ip and main_process_port; a longer "
                    "meeting_timeout waits for slower ones."
                )
        self._met = True

    def _others(self, store: TCPStore, *without: str) -> list[Card]:
        """The other machines that have said nothing of `without`."""
        return [
            each
            for rank, each in cards(store, self._card.machines).items()
            if each is not None
            and rank != self._card.rank
            and not any(store.check([f"{said}/{each.identity}"]) for said in without)
        ]

    def _check(self) -> None:
        """Raises `MeetingError` if the run ended, machine 0 is gone, or the rank is taken."""
        if self._problem is not None:
            raise self._problem
        silent = time.monotonic() - self._asked
        if silent > LOST:
            raise self._lost(f"no answer for {silent:.0f} s")

    def _lost(self, reason: str) -> MeetingError:
        return self._problem or MeetingError(
            f"{meeting_store.capital(self._card)} was in a run of {self._card.machines} machines that meet at "
            f"{self._address}, but machine 0, which keeps the meeting point, is gone: {reason}. Look at its output; "
            "then start all machines again."
        )

    def _beat_on(self, store: TCPStore) -> None:
        try:
            while self._problem is None and not self._end.wait(BEAT):
                self._beat(store)
        except (DistError, OSError) as error:
            self._problem = self._lost(str(error).splitlines()[0])

    def _beat(self, store: TCPStore) -> None:
        self._asked = time.monotonic()  # not since the last answer: one that was halted has asked nothing
        store.add(meeting_store.beats(self._card), 1)
        found = meeting_store.phase(store)
        if found.startswith(ENDED):
            self._problem = MeetingError(found.removeprefix(ENDED))
        self._asked = math.inf

    def _stop(self) -> None:
        """No sign of life from now on."""
        self._end.set()
        if self._heart is not None:
            self._heart.join(2 * BEAT)
        atexit.unregister(self._stop)
