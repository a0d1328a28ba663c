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


class Doubt(NamedTuple):
    """The part that a passed check could not examine, and the command that examines it."""

    text: str


class _Outcome(NamedTuple):
    """Of one check on one rank: what was checked, or what is wrong; of errors that no check expects, where they came from."""

    passed: bool
    text: str
    where: str = ""


class Steps:
    """Runs checks and prints what comes of each, on the main process.

    Args:
        world: all ranks call `run` with the same checks in the same order.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self.failed: list[str] = []

    def run(self, name: str, check: Callable[[], str | tuple[str, Doubt]]) -> bool:
        """Runs one check; collective. Returns whether it has passed on every rank.

        The check returns what was checked, in words (nothing, if nothing was), and perhaps what could not
        be; or raises. Where it raises on one rank only, no other rank may be left in a collective.
        """
        start = time.perf_counter()
        doubt = None
        try:
            found = check()
            text, doubt = found if isinstance(found, tuple) else (found, None)
            outcome = _Outcome(True, text)
        except CheckError as error:
            outcome = _Outcome(False, str(error))
        except Exception as error:  # noqa: BLE001  (whatever is wrong with what is checked)
            outcome = _Outcome(False, f"{type(error).__name__}: {error}", traceback.format_exc())
        outcomes = gather_object([outcome])
        seconds = time.perf_counter() - start
        wrong = [(rank, each) for rank, each in enumerate(outcomes) if not each.passed]
        if wrong:
            self.failed.append(name)
        if self._world.is_main:
            _print(name, outcome.text, wrong, seconds)
            if doubt is not None and not wrong:
                say(f"{mark(DOUBTFUL)} {name}: {doubt.text}", DOUBTFUL)
        return not wrong


def _print(name: str, text: str, wrong: list[tuple[int, _Outcome]], seconds: float) -> None:
    if not wrong:
        if text:
            say(f"{mark(GOOD)} {name}: {text} ({seconds:.1f} s)", GOOD)
        return
    first, outcome = wrong[0]
    ranks = ", ".join(str(rank) for rank, _ in wrong)
    say(f"{mark(BAD)} {name}: on {'rank' if len(wrong) == 1 else 'ranks'} {ranks} ({seconds:.1f} s)", BAD)
    say("\n".join(f"    {line}" for line in outcome.text.splitlines()))
    if outcome.where:
        warn(f"Rank {first} raised:\n{outcome.where}")
