"""Two runs of the same world, bit by bit; a difference has the step, the rank and the name."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal

from accel_diagnostics.resume.digests import UNPREPARED

if TYPE_CHECKING:
    from accel_diagnostics.resume.journal import RankJournal, Step

PARTS = (
    "steps",
    "weights",
    "optimizer",
    "scheduler",
    "registered objects",
    "components",
    "samples",
    "random streams",
    "losses",
)
"""What is compared, in the order in which one is blamed before the next."""

_OF_KIND = {
    "model": "weights",
    "optimizer": "optimizer",
    "scheduler": "scheduler",
    **{name: part for part, name in UNPREPARED.items()},
    "object": "registered objects",
    "random": "random streams",
}
SAW = "what the model saw of"
"""The beginning of the name of a difference between samples of the same ids."""

_ENOUGH = 100_000  # differences after which it is clear that all is different

State = Literal["equal", "close", "differs", "not compared"]


@dataclass(frozen=True)
class Difference:
    """The values of one name that differ; `step` counts from 1, and is 0 at the end of the run."""

    part: str
    step: int
    rank: int
    name: str
    expected: Any
    found: Any


@dataclass(frozen=True)
class Verdict:
    """What was found of one part; `largest` is the largest relative difference within a tolerance."""

    part: str
    state: State
    detail: str = ""
    largest: float | None = None


@dataclass(frozen=True)
class Comparison:
    """The verdict of each part, and the first difference, None if there is none."""

    verdicts: tuple[Verdict, ...]
    first: Difference | None = None
    others: tuple[Difference, ...] = field(default=())

    @property
    def is_exact(self) -> bool:
        """Whether nothing differs."""
        return all(each.state != "differs" for each in self.verdicts)


def part_of(name: str) -> str:
    """The part of a run that a name of its state belongs to."""
    return _OF_KIND.get(re.split(r"[.\[/]", name, maxsplit=1)[0], "components")


def compare(
    expected: Sequence[RankJournal], found: Sequence[RankJournal], begin: int, ignored: frozenset[str]
) -> Comparison:
    """Compares a run with the steps of another from number `begin` on (from 0), and how both end."""
    first: dict[str, Difference] = {}
    count = dict.fromkeys(PARTS, 0)
    for each in islice(differences(expected, found, begin, None, ignored), _ENOUGH):
        first.setdefault(each.part, each)
        count[each.part] += 1
    present = {part_of(name) for each in expected for step in each.steps[:1] for name in step.state}
    verdicts = [
        Verdict(part, "differs", f"{count[part]} differences, the first {place(first[part])}")
        if part in first
        else Verdict(part, "equal")
        for part in PARTS
        if part in {*present, "samples", "losses", *first}
    ]
    ordered = sorted(first.values(), key=lambda each: (each.step or 10**12, PARTS.index(each.part), each.rank))
    return Comparison(tuple(verdicts), ordered[0] if ordered else None, tuple(ordered[1:]))


def place(difference: Difference) -> str:
    """Where it is, as text."""
    step = f"in step {difference.step}" if difference.step else "at the end"
    return f"{step} on rank {difference.rank}"


def differences(
    expected: Sequence[RankJournal],
    found: Sequence[RankJournal],
    begin: int,
    end: int | None,
    ignored: frozenset[str] = frozenset(),
) -> Iterator[Difference]:
    """All differences, by step; `end`: compare the steps before this one, and not how the runs end."""
    last = max(journal.closed() for journal in expected) if end is None else end
    for number in range(begin, last):
        for rank, (mine, other) in enumerate(zip(expected, found, strict=True)):
            if number - begin >= len(other.steps):
                yield Difference("steps", number + 1, rank, "", "a step", "the run had ended")
                return
            yield from _of_step(mine.steps[number], other.steps[number - begin], number + 1, rank, ignored)
    if end is not None:
        return
    for rank, (mine, other) in enumerate(zip(expected, found, strict=True)):
        if other.closed() > last - begin:
            yield Difference(
                "steps", last + 1, rank, "", "the run had ended", f"{other.closed() - last + begin} more steps"
            )
        yield from _of_states(mine.end or {}, other.end or {}, 0, rank, ignored)


def _of_step(mine: Step, other: Step, step: int, rank: int, ignored: frozenset[str]) -> Iterator[Difference]:
    yield from _of_states(mine.state, other.state, step, rank, ignored)
    for number, (ids, seen) in enumerate(zip(mine.ids, other.ids, strict=False)):
        if ids != seen:
            yield Difference("samples", step, rank, f"micro-batch {number + 1}", ids, seen)
        elif mine.rows[number] != other.rows[number]:
            what = f"{SAW} micro-batch {number + 1}"
            yield Difference("samples", step, rank, what, mine.rows[number], other.rows[number])
    for number, (loss, its) in enumerate(zip(mine.losses, other.losses, strict=False)):
        if repr(loss) != repr(its):  # which are equal for nan, and for equal bits alone
            yield Difference("losses", step, rank, f"micro-batch {number + 1}", loss, its)
    if len(mine.losses) != len(other.losses):
        yield Difference("samples", step, rank, "micro-batches", len(mine.losses), len(other.losses))
    if repr(mine.whole) != repr(other.whole):
        yield Difference("losses", step, rank, "window", mine.whole, other.whole)


def _of_states(
    mine: dict[str, str], other: dict[str, str], step: int, rank: int, ignored: frozenset[str]
) -> Iterator[Difference]:
    for name in [*mine, *(each for each in other if each not in mine)]:
        if mine.get(name) != other.get(name) and name not in ignored:
            yield Difference(part_of(name), step, rank, name, mine.get(name, "absent"), other.get(name, "absent"))
