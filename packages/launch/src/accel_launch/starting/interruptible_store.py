"""Questions to a store, with an end: torch's own wait as long as a broken network lets them, and no signal gets through meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from torch.distributed import DistStoreError, TCPStore

SILENT = 30.0
"""Seconds after which a store that does not answer counts as gone."""

_T = TypeVar("_T")


class SilentError(DistStoreError):
    """A store has not answered in time."""


def answer_of(ask: Callable[[], _T], within: float | None) -> _T:
    """Calls `ask` in another thread, so that signals can interrupt this one; returns or raises what it does.

    Args:
        ask: the question.
        within: seconds; None: `ask` has an end of its own.

    Raises:
        SilentError: there was no answer in time. The thread that asked still waits, and holds the
            connection.
    """
    answers: list[_T] = []
    errors: list[BaseException] = []

    def call() -> None:
        try:
            answers.append(ask())
        except BaseException as error:  # noqa: BLE001  (it is raised below, by the thread that asked)
            errors.append(error)

    asking = threading.Thread(target=call, daemon=True)
    asking.start()
    asking.join(within)
    if errors:
        raise errors[0]
    if not answers:
        raise SilentError(f"no answer for {within:.0f} s")
    return answers[0]


class Board(TCPStore):
    """A client or host of a store, of which all questions end: one that is not answered in time is the last.

    Attributes:
        limit: seconds that an answer may take.
    """

    limit = SILENT
    _is_silent = False

    def add(self, key: str, value: int) -> int:
        """Adds to a number, and returns it."""
        return self._ask(lambda: super(Board, self).add(key, value))

    def get(self, key: str) -> bytes:
        """The value of a key."""
        return self._ask(lambda: super(Board, self).get(key))

    def set(self, key: str, value: str) -> None:
        """Writes it there."""
        self._ask(lambda: super(Board, self).set(key, value))

    def check(self, keys: list[str]) -> bool:
        """Whether something stands at each."""
        return self._ask(lambda: super(Board, self).check(keys))

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Writes it there if what stands there is as expected, and returns what then stands there."""
        return self._ask(lambda: super(Board, self).compare_set(key, expected, desired))

    def _ask(self, ask: Callable[[], _T]) -> _T:
        if self._is_silent:
            raise SilentError("it has not answered before")
        try:
            return answer_of(ask, self.limit)
        except SilentError:
            self._is_silent = True
            raise
