"""The server that the ranks connect to: it gives each its job, and receives its report."""

from __future__ import annotations

import pickle
import socket
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from accel_launch.notebook.attendant import Attendant
from accel_launch.notebook.rank import DESK

if TYPE_CHECKING:
    from accel_launch.notebook.function_pickle import Told


class _Visitor(NamedTuple):
    rank: int
    local_rank: int
    round: int


class Desk:
    """A block in which ranks that were started with the folder's path are served. Its answers hold once the block has ended.

    Nobody but this user can reach the socket, for the folder is this user's alone.

    Args:
        folder: of this run, made by `tempfile`.
        job: what every rank is told, see `rank.py`.
        work: the function and its arguments, packed.
        arrives: called with local rank and rank when one comes in.

    Attributes:
        result: what the first rank of this machine told at its end.
        told: by rank, what those told that raised; of the last round, for a run that is started
            again begins anew.
    """

    def __init__(self, folder: Path, job: Mapping[str, Any], work: bytes, arrives: Callable[[int, int], None]) -> None:
        self.result: Told | None = None
        self.told: dict[int, Told] = {}
        self._job, self._work = pickle.dumps(dict(job)), work
        self._arrives = arrives
        self._round = 0
        self._here: set[int] = set()
        self._visitors: dict[Connection, _Visitor] = {}
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(folder / DESK))
        self._listener.listen(128)
        self._attendant = Attendant("desk", self._serve)

    def __enter__(self) -> Desk:
        self._attendant.begin()
        return self

    def __exit__(self, *_: object) -> None:
        self._attendant.dismiss()
        for connection in self._visitors:
            connection.close()
        self._listener.close()

    def _serve(self) -> None:
        open_for_all = True
        while True:
            bell = [self._attendant.bell] if open_for_all else []
            # After the bell, what has been said already is still heard.
            ready = wait([self._listener, *bell, *self._visitors], None if open_for_all else 0)
            if not ready:
                return
            for source in ready:
                if source is self._listener:
                    self._welcome()
                elif isinstance(source, Connection):
                    self._hear(source)
                else:
                    open_for_all = False

    def _welcome(self) -> None:
        connection = Connection(self._listener.accept()[0].detach())
        try:
            said = connection.recv()
            if said["local_rank"] in self._here:  # all ranks have been started again
                self._round += 1
                self._here.clear()
                self.told.clear()
                self.result = None
            self._here.add(said["local_rank"])
            self._visitors[connection] = _Visitor(said["rank"], said["local_rank"], self._round)
            self._arrives(said["local_rank"], said["rank"])
            connection.send_bytes(self._job)
            connection.send_bytes(self._work)
        except (EOFError, OSError):
            self._close(connection)

    def _hear(self, connection: Connection) -> None:
        try:
            told: Told = pickle.loads(connection.recv_bytes())  # noqa: S301  (from the memory of a rank that was started here)
        except (EOFError, OSError):
            self._close(connection)
            return
        visitor = self._visitors[connection]
        if visitor.round != self._round:
            return
        if told.raised:
            self.told[visitor.rank] = told
        elif visitor.local_rank == 0:
            self.result = told

    def _close(self, connection: Connection) -> None:
        self._visitors.pop(connection, None)
        connection.close()
