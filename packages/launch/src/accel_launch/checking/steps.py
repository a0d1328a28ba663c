"""The checks of `accel test`, one after another on all ranks: each passes if every rank passes."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from accel_core import gather_object
from accel_launch.output import BAD, DOUBTFUL, GOOD, mark, say, warn

if TYPE_CHECKING:
    from accel_core import World


class CheckError(Exception):
    """A check has found something: expected, found, what to do. Raised on any rank."""


class Passed(NamedTuple):
    """The words on what a passed check has looked at (empty: nothing), and what it could not."""

    text: str
    doubt: str = ""


class _Failed(NamedTuple):
    """The problem on one rank; of errors that no check expects, their traceback."""

    text: str
    where: str = ""


class Steps:
    """Runs checks, in the same order on all ranks, and prints their results on the main process."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.failed: list[str] = []

    def run(self, name: str, check: Callable[[], Passed]) -> None:
        """Runs a check; collective. If it raises on one rank, none may be left in a collective."""
        start = time.perf_counter()
        outcome: Passed | _Failed
        try:
            outcome = check()
        except CheckError as error:
            outcome = _Failed(str(error))
        except Exception as error:  # noqa: BLE001  (whatever is wrong with what is checked)
            outcome = _Failed(f"{type(error).__name__}: {error}", traceback.format_exc())
        outcomes = enumerate(gather_object([outcome]))
        wrong = {str(rank): each for rank, each in outcomes if isinstance(each, _Failed)}
        if wrong:
            self.failed.append(name)
        if self._world.is_main:
            _print(name, outcome, wrong, f"({time.perf_counter() - start:.1f} s)")


def _print(name: str, outcome: Passed | _Failed, wrong: dict[str, _Failed], took: str) -> None:
    if not wrong and isinstance(outcome, Passed):
        if outcome.text:
            say(f"{mark(GOOD)} {name}: {outcome.text} {took}", GOOD)
        if outcome.doubt:
            say(f"{mark(DOUBTFUL)} {name}: {outcome.doubt}", DOUBTFUL)
        return
    first, failed = next(iter(wrong.items()))
    say(f"{mark(BAD)} {name}: on {'rank' if len(wrong) == 1 else 'ranks'} {', '.join(wrong)} {took}", BAD)
    say("\n".join(f"    {line}" for line in failed.text.splitlines()))
    if failed.where:
        warn(f"Rank {first} raised:\n{failed.where}")
