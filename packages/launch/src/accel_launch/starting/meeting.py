"""A rendezvous for torch's elastic agent: machines of fixed ranks meet, and meet again after restarts.

Machine 0's launcher keeps a store, the *board*, at main_process_ip:main_process_port for as long as
the run lasts. Machines gather there in *rounds*. A round is complete when all of them are in it;
then every launcher starts its processes, which meet at a store of their own. When the processes of
a machine have failed, or a machine that was lost is back, it waits in the next round: the launchers
of the others see that, stop their processes and come too.

torch's own backends do not serve here. "static" has no rounds: a machine that was restarted counts
its restarts anew, and finds the keys of the old round. "c10d" numbers machines as they come, so
that a machine rank would mean nothing.

Everyone learns at once why a run ends: that two machines claim one rank, that they were told
different numbers, that one has failed for good. A machine that just vanishes is waited for, until
the timeout; machine 0 is not, because the board is gone with it.
"""

from __future__ import annotations

import contextlib
import sys
from datetime import timedelta
from typing import TYPE_CHECKING

from torch.distributed import DistError
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from accel_launch.output import warn
from accel_launch.starting import outcome
from accel_launch.starting.board import Address, MeetingError, find_board, open_board, opened_by
from accel_launch.starting.claims import Card, Pulse, capitalized, claim, owner_of, refuse
from accel_launch.starting.deadline import Patience
from accel_launch.starting.heartbeat import Heartbeat, lost
from accel_launch.starting.rounds import AgentStore, come_together, compare_numbers

if TYPE_CHECKING:
    from accel_launch.starting.interruptible_store import Board

BACKEND = "machines"
"""The name of this rendezvous in torch's registry."""

_STORE_TIMEOUT = timedelta(minutes=1)  # of the messages between torch's agents once a round is complete
_FAREWELL = 10.0  # seconds for each word of a machine that leaves: the network may be what has failed
_LAST_WORDS = timedelta(seconds=5)  # for which a machine 0 that has failed keeps the board, so that the others hear why


def register() -> None:
    """Makes this rendezvous known to torch as `machines`. Its options are `rank`, `processes` and `timeout` (seconds)."""
    rendezvous_handler_registry.register(BACKEND, _create)


def _create(parameters: RendezvousParameters) -> RendezvousHandler:
    host, port = parse_rendezvous_endpoint(parameters.endpoint, -1)
    rank, processes = parameters.get_as_int("rank"), parameters.get_as_int("processes")
    timeout = parameters.get_as_int("timeout")
    if port < 1 or rank is None or processes is None or timeout is None:
        raise MeetingError(
            f"Machines meet by their ranks at host:port, and are told rank, processes and timeout. Found the endpoint "
            f"{parameters.endpoint!r} and {parameters.config}. Give main_process_ip, main_process_port and machine_rank."
        )
    card = Card(rank, parameters.max_nodes, processes)
    return MachineRendezvous(Address(host, port), card, timedelta(seconds=timeout), parameters.run_id)


class MachineRendezvous(RendezvousHandler):
    """The meetings of this machine with the others of its run.

    Args:
        address: where machine 0 keeps the board.
        card: who this machine is.
        timeout: how long it waits for the others, each time.
        run_id: what torch calls the run.
    """

    def __init__(self, address: Address, card: Card, timeout: timedelta, run_id: str = "") -> None:
        self._address = address
        self._card = card
        self._timeout = timeout
        self._run_id = run_id
        self._board: Board | None = None
        self._heart: Heartbeat | None = None
        self._agents: AgentStore | None = None  # of the last round that this machine was in

    def get_backend(self) -> str:
        """The name in torch's registry."""
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        """False: processes meet at a store of their own, new in each round. Machines count restarts each for themselves."""
        return False

    def get_run_id(self) -> str:
        """The id of the run in torch's rendezvous."""
        return self._run_id

    def next_rendezvous(self) -> RendezvousInfo:
        """Comes to the round that is open, and returns when all machines are in it.

        Raises:
            MeetingError: somebody does not come in time or never will, a rank is claimed twice, or
                machines were told different numbers of machines or processes.
        """
        patience = Patience(self._timeout)
        first = self._agents is None
        try:
            board, heart = self._enter(patience)
            round = come_together(board, heart, self._card, self._address, patience)
        except DistError as error:
            raise lost(self._address, self._card, str(error).splitlines()[0]) from error
        heart.watch(round.number + 1)
        for note in round.notes if first else ():
            warn(f"accel launch: {note}")
        self._agents = AgentStore(board, round.number)
        meeting_point = RendezvousStoreInfo(self._address.host, round.port)
        return RendezvousInfo(self._agents, self._card.rank, self._card.machines, meeting_point)

    def num_nodes_waiting(self) -> int:
        """The number of machines that wait in the next round. Never waits for the network itself.

        Raises:
            MeetingError: the run has ended on another machine, or machine 0 is gone.
        """
        if self._heart is None:
            return 0
        self._heart.check()
        return self._heart.waiting

    def is_closed(self) -> bool:
        """Whether nobody can meet here any more."""
        return False

    def set_closed(self) -> None:
        """Does nothing: a run ends when a machine ends for good; see `shutdown`."""

    def shutdown(self) -> bool:
        """This machine ends for good: well, if torch's agent said so; else as failed, because of the exception on its way.

        Machine 0 returns when the others need the board no more.

        Raises:
            MeetingError: all is well on this machine, but the run has failed on another.
        """
        error = sys.exc_info()[1]
        if isinstance(error, MeetingError):
            self._leave(str(error))
        elif error is None and self._agents is not None and self._agents.finished:
            self._leave("")
        else:
            self.fail(_reason(error))
        return True

    def fail(self, reason: str) -> None:
        """Ends this machine for good as failed, because of `reason`; the others end at once, and say it."""
        self._leave(
            f"{capitalized(self._card)} has failed and does not come back: {reason}. Look at what it printed. To go on after "
            f"failures, from a checkpoint: --max-restarts, the same on all machines."
        )

    def _leave(self, failure: str) -> None:
        board, heart, agents = self._board, self._heart, self._agents
        self._board = self._heart = self._agents = None
        if board is None or heart is None:
            return
        board.limit = _FAREWELL
        failed_elsewhere: MeetingError | None = None
        try:
            with contextlib.suppress(DistError):  # machine 0 is gone: nobody is left to be told
                if failure:
                    outcome.end(board, failure, begun=agents is not None)  # who has met nobody ends no run of others
                    if agents is not None and not agents.finished:
                        agents.let_others_go(self._card.machines)
                if agents is not None:
                    outcome.finish(board, self._card.rank)
                if self._card.rank == 0:
                    self._keep_open(board, _LAST_WORDS if failure else None)
                failed_elsewhere = outcome.ended(board)
        finally:
            heart.stop()
        if failed_elsewhere is not None and not failure:
            raise MeetingError(f"The processes of machine {self._card.rank} have finished, but: {failed_elsewhere}")

    def _enter(self, patience: Patience) -> tuple[Board, Heartbeat]:
        """Comes to the board, and claims the rank of this machine; the first time only."""
        if self._board is None or self._heart is None:
            board = self._find(patience)
            board.set_timeout(_STORE_TIMEOUT)
            if self._card.rank == 0 and opened_by(board) != self._card.identity:
                refuse(board, self._card)
            claim(board, self._card)
            self._board, self._heart = board, Heartbeat(board, self._address, self._card)
            compare_numbers(board, self._card)
        return self._board, self._heart

    def _find(self, patience: Patience) -> Board:
        """The board of this run, and not of an earlier one, which is about to close."""
        while True:
            board, problem = self._look()
            if board is not None and not (problem := outcome.over(board, self._card.rank)):
                return board
            board = None
            if not patience.wait(lambda: f"waiting for machine 0 to open {self._address} ({problem})"):  # noqa: B023
                raise MeetingError(
                    f"{capitalized(self._card)} was to meet {self._card.machines - 1} others at {self._address}. It waited "
                    f"{patience.waited}, and machine 0 did not open this meeting point: {problem}. Check that accel launch "
                    f"runs on machine 0, with machine_rank 0; that main_process_ip and main_process_port are the same on "
                    f"every machine; and that no firewall closes this port and those above 1024 between them."
                )

    def _look(self) -> tuple[Board | None, str]:
        if self._card.rank != 0:
            return find_board(self._address)
        return open_board(self._address, self._card.identity), ""

    def _keep_open(self, board: Board, limit: timedelta | None) -> None:
        """Keeps the board for the machines that still live and have not finished; for `limit` at most."""
        pulse, patience = Pulse(board), Patience(limit)

        def rest() -> list[int]:
            owners = {rank: owner_of(board, rank) for rank in range(1, self._card.machines)}
            return [
                rank
                for rank, owner in owners.items()
                if owner is not None and not outcome.has_finished(board, rank) and not pulse.is_silent(owner.identity)
            ]

        while rest() and patience.wait(
            lambda: (
                f"machine 0 has finished, and keeps the meeting point open for machines {', '.join(map(str, rest()))}"
            )
        ):
            pass


def _reason(error: BaseException | None) -> str:
    if isinstance(error, ChildFailedError):
        rank, failure = error.get_first_failure()
        how = f"with status {failure.exitcode}" if failure.exitcode >= 0 else f"by {failure.signal_name()}"
        return f"rank {rank} was ended {how}"
    return "its processes have failed" if error is None else f"{type(error).__name__}: {error}"
