"""The step of the uninterrupted run at which the resumed run begins."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from accel_diagnostics.resume.comparison import part_of

if TYPE_CHECKING:
    from accel_diagnostics.resume.journal import RankJournal, Step


class Beginning(NamedTuple):
    """The number of steps (from 0) before the resumed run, and how that is known."""

    step: int
    how: str
    loaded: str | None = None


def find_beginning(
    whole: Sequence[RankJournal], killed: Sequence[RankJournal], resumed: Sequence[RankJournal]
) -> Beginning | None:
    """Where the resumed run goes on: by the folder that it loaded, else by its weights or samples.

    None: it begins as a new run does.
    """
    saves = {folder: step for step, folder in killed[0].saves}
    for _, folder in reversed(resumed[0].loads):
        if folder in saves:
            return Beginning(saves[folder], "loaded", folder)
    first, steps = resumed[0].steps[0], whole[0].steps
    if _weights(first) == _weights(steps[0]) and first.samples() == steps[0].samples():
        return None
    alike = [number for number, step in enumerate(steps) if number and _weights(step) == _weights(first)]
    if alike:
        return Beginning(alike[-1], "by its weights")
    rest = len(steps) - len(resumed[0].steps)
    if rest > 0:
        return Beginning(rest, "by the number of its steps")
    seen = [number for number, step in enumerate(steps) if step.samples() == first.samples()]
    return Beginning(seen[-1] if seen else 0, "by its samples")


def _weights(step: Step) -> dict[str, str]:
    return {name: text for name, text in step.state.items() if part_of(name) == "weights"}
