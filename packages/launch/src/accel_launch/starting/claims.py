"""The identity of a machine, its claim to a rank that no other machine has, and its signs of life.

A machine hands in a *card* at the board under its rank. Whoever finds another's card there looks
whether its owner still lives: each owner counts up a number of its own, twice a second. A rank
whose owner has been silent goes to the newcomer, which is most likely the same machine after a
restart; one whose owner lives does not.
"""

from __future__ import annotations

import json
import os
import socket
import time
import uuid
from dataclasses import asdict, dataclass, field, fields
from importlib import metadata
from typing import NoReturn

from torch.distributed import TCPStore

from accel_launch.starting.board import MeetingError
from accel_launch.starting.outcome import GOES_ON, end, has_begun

BEAT = 0.5
"""Seconds between two signs of life."""
SILENCE = 3.0
"""Seconds without one after which a machine counts as gone, and its rank may be taken by another."""

_COMPARED = ("accel-core", "accel-launch", "torch")


def _versions() -> dict[str, str]:
    return {name: metadata.version(name) for name in _COMPARED}


@dataclass(frozen=True)
class Card:
    """The description of a machine that the others read.

    Args:
        rank: of the machine.
        machines, processes: what it was told about the whole run.
        host, pid: for messages.
        versions: of what has to work together.
        identity: of this start of the launcher; another start has another one.
    """

    rank: int
    machines: int
    processes: int
    host: str = field(default_factory=socket.gethostname)
    pid: int = field(default_factory=os.getpid)
    versions: dict[str, str] = field(default_factory=_versions)
    identity: str = field(default_factory=lambda: uuid.uuid4().hex)

    def __str__(self) -> str:
        return f"machine {self.rank} ({self.host}, process {self.pid})"

    def text(self) -> str:
        """The JSON text of the card, which is stored at the board."""
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def parse(cls, text: str | bytes) -> Card:
        """The card that `text` gave; what a later version may have added is left out."""
        told = json.loads(text)
        return cls(**{each.name: told[each.name] for each in fields(cls)})


def capitalized(card: Card) -> str:
    """The card in words, as a sentence begins with it."""
    return f"M{str(card)[1:]}"


def claim(board: TCPStore, card: Card) -> None:
    """Makes the rank of `card` its own.

    Raises:
        MeetingError: another machine has this rank, and lives.
    """
    expected = ""
    while True:
        found = board.compare_set(_owner(card.rank), expected, card.text()).decode()
        if found == card.text():
            return
        owner = Card.parse(found)
        if lives(board, owner.identity):
            refuse(board, card)
        expected = found


def refuse(board: TCPStore, card: Card) -> NoReturn:
    """Raises `MeetingError` because the rank of `card` is another's; there too, if the run has not begun."""
    reason = (
        f"Machine rank {card.rank} of {card.machines} was claimed twice: by {Card.parse(board.get(_owner(card.rank)))} and by "
        f"{card.host}, process {card.pid}. Give each machine a machine_rank of its own, from 0 to {card.machines - 1}, and each "
        f"run a main_process_port of its own."
    )
    end(board, reason, begun=False)
    raise MeetingError(reason + (GOES_ON if has_begun(board) else ""))


def cards(board: TCPStore, machines: int) -> dict[int, Card]:
    """The cards of those that have come, by rank."""
    found = {rank: owner_of(board, rank) for rank in range(machines)}
    return {rank: card for rank, card in found.items() if card is not None}


def lives(board: TCPStore, identity: str) -> bool:
    """Whether this owner gives a sign of life: at once if it does, within `SILENCE` if not."""
    pulse, end = Pulse(board), time.monotonic() + SILENCE
    first = pulse.count(identity)
    while time.monotonic() < end:
        time.sleep(BEAT / 10)
        if pulse.count(identity) != first:
            return True
    return False


def owner_of(board: TCPStore, rank: int) -> Card | None:
    """The card of the machine that has this rank, if one has."""
    return Card.parse(board.get(_owner(rank))) if board.check([_owner(rank)]) else None


def first_card(board: TCPStore) -> Card:
    """That of machine 0, which hands it in as soon as it has opened the board."""
    return Card.parse(board.get(_owner(0)))


def give_sign(board: TCPStore, card: Card) -> None:
    """One sign of life."""
    board.add(_beats(card.identity), 1)


class Pulse:
    """Watches the signs of life of others."""

    def __init__(self, board: TCPStore) -> None:
        self._board = board
        self._last: dict[str, tuple[int, float]] = {}

    def count(self, identity: str) -> int:
        """The number of signs of life that the owner of this identity has given."""
        return self._board.add(_beats(identity), 0)

    def is_silent(self, identity: str) -> bool:
        """Whether it has given none for `SILENCE`, as seen from the calls of this method."""
        count, now = self.count(identity), time.monotonic()
        last, since = self._last.get(identity, (-1, now))
        if count != last:
            self._last[identity] = count, now
            return False
        return now - since > SILENCE


def _owner(rank: int) -> str:
    return f"owner/{rank}"


def _beats(identity: str) -> str:
    return f"beats/{identity}"
