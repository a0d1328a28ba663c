"""Rounds: in each, all machines come together at the board, and learn where their processes meet."""

from __future__ import annotations

import json
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from torch.distributed import PrefixStore, TCPStore
from torch.distributed.elastic.agent.server import api as torch_agent
from torch.distributed.elastic.utils import store as torch_store

from accel_launch.starting.board import Address, MeetingError, free_port
from accel_launch.starting.claims import Card, Pulse, cards, first_card
from accel_launch.starting.heartbeat import Heartbeat, arrivals
from accel_launch.starting.interruptible_store import SILENT, answer_of
from accel_launch.starting.outcome import GOES_ON, begin, end, end_well, ended, ended_well, has_begun

if TYPE_CHECKING:
    from accel_launch.starting.deadline import Patience

_ROUNDS = "rounds"  # how many are complete


class Round(NamedTuple):
    """A round that is complete.

    Args:
        number: from 0.
        port: on machine 0, at which the processes meet.
        notes: what is odd and yet no error, the same on all machines.
    """

    number: int
    port: int
    notes: list[str]


class AgentStore(PrefixStore):
    """The part of the board in which torch's agents agree on the ranks of a round's processes, and end together.

    Attributes:
        finished: whether the agent of this machine has come to the barrier in which they wait for
            each other at the end, which it does when all its processes have ended well.
    """

    def __init__(self, board: TCPStore, number: int) -> None:
        super().__init__(f"round/{number}/agents", board)
        self.finished = False
        self._ended_well = partial(end_well, board, number)

    def add(self, key: str, amount: int) -> int:
        """Counts `key` up, and takes notice."""
        if key.startswith(torch_agent._TERMINAL_STATE_SYNC_ID):
            self.finished = True
            self._ended_well()
        return answer_of(lambda: super(AgentStore, self).add(key, amount), SILENT)

    def get(self, key: str) -> bytes:
        """The value of `key`; waits for it up to the timeout of the store, and hears signals meanwhile."""
        return answer_of(lambda: super(AgentStore, self).get(key), None)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Waits until something stands at each of `keys`, and hears signals meanwhile."""
        more = () if timeout is None else (timeout,)
        answer_of(lambda: super(AgentStore, self).wait(keys, *more), None)

    def let_others_go(self, machines: int) -> None:
        """Comes to that barrier in place of the agent of this machine, which has failed."""
        torch_store._barrier_nonblocking(self, machines, torch_agent._TERMINAL_STATE_SYNC_ID)


def come_together(board: TCPStore, heart: Heartbeat, card: Card, address: Address, patience: Patience) -> Round:
    """Comes to the open round, and returns when all machines are in it.

    Raises:
        MeetingError: they are not in time, or never will.
    """
    pulse = Pulse(board)
    while True:
        number = board.add(_ROUNDS, 0)
        board.set(_here(number, card.rank), card.identity)
        board.add(arrivals(number), 1)
        while not board.check([_complete(number)]):
            heart.check()
            _check_nobody_has_finished(board, number, card, address)
            if card.rank == 0 and not _missing(board, number, card, pulse):
                _complete_round(board, number, card, address)
            elif not patience.wait(lambda: _waiting(board, number, card, pulse, address)):  # noqa: B023
                raise _not_all_came(_waiting(board, number, card, pulse, address), patience)
        told = json.loads(board.get(_complete(number)))
        if told["machines"][str(card.rank)] == card.identity:
            return Round(number, told["port"], told["notes"])
        # else this round went with the one that had this rank before


def _check_nobody_has_finished(board: TCPStore, number: int, card: Card, address: Address) -> None:
    """An agent whose processes have ended well comes to no more rounds."""
    finished = ended_well(board, number - 1)
    if finished and ended(board) is None:
        raise MeetingError(
            f"Machine {card.rank} of {card.machines} came to {address} to start its processes again, but those of {finished} "
            f"of the machines have finished already, so that nobody is left to train with. Look at what failed here at the end "
            f"of the run; start all machines again to go on from a checkpoint."
        )


def _missing(board: TCPStore, number: int, card: Card, pulse: Pulse) -> list[int]:
    """The ranks that are not in the round, or that came and have been silent since."""
    ranks = []
    for rank in range(card.machines):
        here = _here(number, rank)
        if not board.check([here]) or (rank != card.rank and pulse.is_silent(board.get(here).decode())):
            ranks.append(rank)
    return ranks


def _complete_round(board: TCPStore, number: int, card: Card, address: Address) -> None:
    if not begin(board):
        raise ended(board) or MeetingError("The run has ended.")
    machines = {str(rank): board.get(_here(number, rank)).decode() for rank in range(card.machines)}
    told = {
        "machines": machines,
        "port": free_port(address.port + 1),
        "notes": differing_versions(cards(board, card.machines)),
    }
    board.set(_complete(number), json.dumps(told))
    board.add(_ROUNDS, 1)


def compare_numbers(board: TCPStore, card: Card) -> None:
    """Makes sure that this machine was told the same numbers as machine 0.

    Raises:
        MeetingError: it was not. If the run has not begun, on all machines that have come.
    """
    first = first_card(board)
    if (first.machines, first.processes) == (card.machines, card.processes):
        return
    came = cards(board, max(first.machines, card.machines))
    rows = [
        f"  {each.rank:>7}  {each.machines:>12}  {each.processes:>13}  {each.host}, process {each.pid}"
        for each in came.values()
    ]
    reason = "\n".join(
        [
            "The machines of a run were told different numbers:",
            "  machine  num_machines  num_processes  who",
            *rows,
            "Give all machines the same num_machines and num_processes, those of the whole run.",
        ]
    )
    end(board, reason, begun=False)
    raise MeetingError(reason + (GOES_ON if has_begun(board) else ""))


def differing_versions(came: dict[int, Card]) -> list[str]:
    """A line for each distribution whose version is not the same on all machines."""
    notes = []
    for name in came[0].versions:
        versions = {rank: card.versions.get(name, "none") for rank, card in came.items()}
        if len(set(versions.values())) > 1:
            found = ", ".join(f"{version} on machine {rank}" for rank, version in versions.items())
            notes.append(f"{name} differs between the machines ({found}): install the same version on all.")
    return notes


def _waiting(board: TCPStore, number: int, card: Card, pulse: Pulse, address: Address) -> str:
    missing = _missing(board, number, card, pulse)
    noun = "machine" if len(missing) == 1 else "machines"
    return f"waiting for {noun} {', '.join(map(str, missing))} of {card.machines} at {address}"


def _not_all_came(waiting: str, patience: Patience) -> MeetingError:
    return MeetingError(
        f"After {patience.waited} this machine was still {waiting}. Check that accel launch runs on each of them, with its own "
        f"machine_rank and the same main_process_ip and main_process_port; a machine that needs longer to come is waited for "
        f"with a longer meeting_timeout."
    )


def _here(number: int, rank: int) -> str:
    return f"round/{number}/here/{rank}"


def _complete(number: int) -> str:
    return f"round/{number}/complete"
