"""The thread of a launcher that tells the other machines that this one lives, and hears what becomes of the run."""

from __future__ import annotations

import atexit
import threading
import time

from torch.distributed import DistError, TCPStore

from accel_launch.starting.board import Address, BoardLostError, MeetingError, connect_again
from accel_launch.starting.claims import BEAT, SILENCE, Card, capitalized, give_sign, owner_of
from accel_launch.starting.outcome import ended

LOST = 30.0
"""Seconds without an answer after which machine 0 counts as gone. A connection that breaks tells it at once."""


class Heartbeat:
    """Gives signs of life in a thread of its own, and looks what happens at the board meanwhile.

    The main thread never waits for the network because of it: it reads what was found last.

    Attributes:
        waiting: how many machines wait in the round that is open.
    """

    def __init__(self, board: TCPStore, address: Address, card: Card) -> None:
        self.waiting = 0
        self._board = connect_again(board, address)
        self._address = address
        self._card = card
        self._round: int | None = None
        self._problem: MeetingError | None = None
        self._answered = time.monotonic()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="accel-heartbeat", daemon=True)
        self._beat()
        self._thread.start()
        atexit.register(self.stop)  # a thread that torch wakes up in an interpreter that ends takes the process down

    def watch(self, round: int | None) -> None:
        """From now on `waiting` is about this round."""
        self._round, self.waiting = round, 0

    def check(self) -> None:
        """Raises `MeetingError` if the run has ended elsewhere, machine 0 is gone, or another machine has this rank."""
        if self._problem is not None:
            raise self._problem
        silent = time.monotonic() - self._answered
        if silent > LOST and not self._end.is_set():
            raise lost(self._address, self._card, f"no answer for {silent:.0f} s")

    def stop(self) -> None:
        """No sign of life from now on."""
        self._end.set()
        self._thread.join(2 * BEAT)
        atexit.unregister(self.stop)

    def _run(self) -> None:
        while not self._end.wait(BEAT):
            try:
                self._beat()
            except (DistError, OSError) as error:
                self._problem = lost(self._address, self._card, str(error).splitlines()[0])
                return
            if self._problem is not None:
                return

    def _beat(self) -> None:
        board, card = self._board, self._card
        give_sign(board, card)
        self._problem = ended(board)
        owner = owner_of(board, card.rank) or card
        if owner.identity != card.identity:
            self._problem = MeetingError(
                f"This machine had rank {card.rank} of {card.machines} at {self._address}, but gave no sign of life for "
                f"{SILENCE:.0f} s, and {owner} has taken its rank. Its processes end. Start each machine rank once only."
            )
        elif self._round is not None:
            self.waiting = board.add(arrivals(self._round), 0)
        self._answered = time.monotonic()


def lost(address: Address, card: Card, reason: str) -> BoardLostError:
    """The error of a machine whose machine 0 is gone."""
    return BoardLostError(
        f"{capitalized(card)} was in a run of {card.machines} machines that meet at {address}, but machine 0, which keeps "
        f"the meeting point, is gone: {reason}. Look at the output of machine 0; then start all machines again: without "
        f"machine 0 the others cannot go on."
    )


def arrivals(round: int) -> str:
    """The key that counts who has come to a round."""
    return f"round/{round}/arrivals"
