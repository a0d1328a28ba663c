"""Two runs of different worlds: samples in order, losses and states at the end within a tolerance."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from accel_checkpoint import read_values
from accel_core.api.component import flatten, paths
from accel_diagnostics.resume.comparison import Comparison, Difference, Verdict, part_of

if TYPE_CHECKING:
    from accel_diagnostics.resume.journal import RankJournal

_COMPARED = ("weights", "optimizer", "scheduler", "registered objects")
_OTHER_RANDOM = "each world has random streams of its own"


def compare_worlds(
    expected: Sequence[RankJournal],
    found: Sequence[RankJournal],
    begin: int,
    tolerance: float,
    ignored: frozenset[str],
) -> Comparison:
    """Compares a run with the steps of another from number `begin` on (from 0), and how both end."""
    mine, other = _by_step(expected)[begin:], _by_step(found)
    first = [_samples(mine, other, begin)]
    verdicts = [_verdict("samples", first[0], f"{sum(map(len, other))} in {len(other)} steps")]
    why = _incomparable(mine, other, first[0])
    if why:
        verdicts += [Verdict(part, "not compared", why) for part in (*_COMPARED, "losses")]
    else:
        largest, difference = _losses(expected, found, begin, tolerance)
        first.append(difference)
        verdicts.append(_verdict("losses", difference, "", largest))
        ends, differing = _ends(expected[0], found[0], tolerance, ignored)
        first += differing
        verdicts += ends
    verdicts.append(Verdict("random streams", "not compared", _OTHER_RANDOM))
    real = sorted((each for each in first if each is not None), key=lambda each: each.step or 10**12)
    return Comparison(tuple(verdicts), real[0] if real else None, tuple(real[1:]))


def _verdict(part: str, difference: Difference | None, detail: str, largest: float | None = None) -> Verdict:
    if difference is not None:
        return Verdict(part, "differs", detail, largest)
    return Verdict(part, "close" if largest else "equal", detail, largest)


def _by_step(journals: Sequence[RankJournal]) -> list[list[Any]]:
    """The samples of each step over all ranks, in the order of the data: micro-batch by micro-batch."""
    steps = []
    for ranks in zip(*(journal.steps for journal in journals), strict=False):
        batches = zip_longest(*(step.samples() for step in ranks), fillvalue=[])
        steps.append([each for batch in batches for of_rank in batch for each in of_rank])
    return steps


def _samples(mine: list[list[Any]], other: list[list[Any]], begin: int) -> Difference | None:
    place = 0
    found = [each for step in other for each in step]
    for number, step in enumerate(mine, begin + 1):
        seen = found[place : place + len(step)]
        if seen != step:
            return Difference("samples", number, 0, "of all ranks, in order", step, seen)
        place += len(step)
    if place < len(found):
        return Difference("samples", begin + len(mine) + 1, 0, "of all ranks, in order", [], found[place:])
    return None


def _incomparable(mine: list[list[Any]], other: list[list[Any]], samples: Difference | None) -> str:
    if samples is not None:
        return "the samples differ"
    if [*map(len, mine)] != [*map(len, other)]:
        return (
            f"a step has {len(mine[0])} samples there and {len(other[0])} here: with split_batches=True, or a batch size that "
            f"is divided by the number of processes, steps would be the same"
        )
    return ""


def _losses(
    expected: Sequence[RankJournal], found: Sequence[RankJournal], begin: int, tolerance: float
) -> tuple[float, Difference | None]:
    largest = 0.0
    for number, (mine, other) in enumerate(
        zip(_step_losses(expected)[begin:], _step_losses(found), strict=False), begin + 1
    ):
        apart = _apart(mine, other)
        largest = max(largest, apart)
        if not apart <= tolerance:
            return apart, Difference("losses", number, 0, "mean of all ranks", mine, other)
    return largest, None


def _step_losses(journals: Sequence[RankJournal]) -> list[float]:
    """The mean loss of each step over its samples."""
    means = []
    for ranks in zip(*(journal.steps for journal in journals), strict=False):
        if ranks[0].whole is not None:
            means.append(ranks[0].whole)  # the same on all ranks
            continue
        pairs = [
            (loss, len(batch) or 1) for step in ranks for loss, batch in zip(step.losses, step.samples(), strict=True)
        ]
        means.append(math.fsum(loss * weight for loss, weight in pairs) / sum(weight for _, weight in pairs))
    return means


def _apart(mine: float, other: float) -> float:
    """The difference relative to the larger one; 0 for two nan."""
    if mine == other or (math.isnan(mine) and math.isnan(other)):
        return 0.0
    return abs(mine - other) / max(abs(mine), abs(other))


def _ends(
    mine: RankJournal, other: RankJournal, tolerance: float, ignored: frozenset[str]
) -> tuple[list[Verdict], list[Difference]]:
    if mine.final is None or other.final is None:
        why = f"the state at the end could not be saved: {mine.note or other.note or 'the script never reached it'}"
        return [Verdict(part, "not compared", why) for part in _COMPARED], []
    largest, differing, present = dict.fromkeys(_COMPARED, 0.0), dict[str, Difference](), set[str]()
    found = dict(_values(Path(other.final)))
    for name, value in _values(Path(mine.final)):
        part = part_of(name)
        if part not in _COMPARED or name in ignored:
            continue
        present.add(part)
        apart = _distance(value, found.get(name))
        largest[part] = max(largest[part], apart)
        if not apart <= tolerance:
            shown = (_shown(value), f"{_shown(found.get(name))}, which is {apart:.1e} apart")
            differing.setdefault(part, Difference(part, 0, 0, name, *shown))
    verdicts = [
        _verdict(part, differing.get(part), "at the end", largest[part]) for part in _COMPARED if part in present
    ]
    return verdicts, list(differing.values())


def _values(folder: Path) -> Iterator[tuple[str, Any]]:
    """Every tensor and plain value of a checkpoint, by name."""
    for name, value in read_values(folder):
        yield from zip(paths(value, name), flatten(value)[0], strict=True)


def _distance(mine: Any, other: Any) -> float:
    """How far apart two values are, relative to their size; inf where they cannot be compared."""
    if isinstance(mine, torch.Tensor) and isinstance(other, torch.Tensor) and mine.shape == other.shape:
        if torch.equal(mine, other):
            return 0.0
        mine, other = mine.double(), other.double()
        return float((mine - other).norm() / mine.norm().clamp_min(torch.finfo(torch.float64).tiny))
    if isinstance(mine, (int, float)) and isinstance(other, (int, float)):
        return _apart(mine, other)
    same = type(mine) is type(other) and not isinstance(mine, torch.Tensor) and mine == other
    return 0.0 if same else math.inf


def _shown(value: Any) -> str:
    return f"a tensor {list(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
