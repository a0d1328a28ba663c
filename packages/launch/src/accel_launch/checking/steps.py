"""The checks of `accel test`, one after another on all ranks: each has passed where it passed on every rank."""

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
    """A check has found something: what was expected, what was found, what to do. Raised on any rank."""


class Passed(NamedTuple):
    """What a check that passed has looked at, in words (empty: at nothing), and what it could not."""

    text: str
    doubt: str = ""


class _Failed(NamedTuple):
    """What is wrong on one rank; of errors that no check expects, where they came from."""

    text: str
    where: str = ""


class Steps:
    """Runs checks and prints what comes of each, on the main process. All ranks run the same ones in the same order."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.failed: list[str] = []

    def run(self, name: str, check: Callable[[], Passed]) -> None:
        """Runs one check; collective. Where it raises on one rank only, no other rank may be left in a collective."""
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
