"""R1, R2, R11: loaders go on where killed processes saved them, on any number of processes, and read nothing for it."""

from __future__ import annotations

import itertools
import os
import random
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from resume_job import (
    LOADERS,
    SAMPLES,
    SAVED,
    WORKERS,
    Chain,
    Run,
    Step,
    first_life,
    leg,
    read_journal,
    second_life,
    steps_before,
)

from accel_core.testing import RanksFailed, run_ranks

BATCH = 2
SAMPLED = 84
CHOICES: tuple[Sequence[Any], ...] = (tuple(LOADERS), WORKERS, SAVED, (0, 1, 2), (True, False), (1, 2, 4))


DISPATCHED = {kind for kind in LOADERS if "dispatched" in kind} | {
    "stream",
    "tape",
    "StatefulDataLoader of a tape",
    "nodes",
}


def possible(run: Run) -> bool:
    """Whether what is used can keep the promise: torchdata 0.11 loses samples of workers that persist.

    The state of its loader behind the first batches of a later epoch says of some workers that they are at the end.
    """
    return (run.kind, run.workers) != ("StatefulDataLoader of a tape", "persistent")


def pairwise(choices: Sequence[Sequence[Any]], limit: int) -> list[tuple[Any, ...]]:
    """Combinations in which as many pairs of values as possible stand together; the same in every run."""
    draw = random.Random(0)
    pairs = lambda combination: set(itertools.combinations(enumerate(combination), 2))
    seen: set[Any] = set()
    found = []
    for _ in range(limit):
        candidates = [tuple(draw.choice(values) for values in choices) for _ in range(60)]
        found.append(max(candidates, key=lambda candidate: len(pairs(candidate) - seen)))
        seen |= pairs(found[-1])
    return found


def sampled(world: int) -> list[Run]:
    """The runs that are made by default."""
    runs = [Run(*run) for *run, size in pairwise(CHOICES, SAMPLED) if size == world]
    return list(filter(possible, runs))


def whole(kind: str) -> list[Run]:
    """Every run of a loader."""
    return list(filter(possible, itertools.starmap(Run, itertools.product((kind,), *CHOICES[1:-1]))))


def killed(job: Callable[..., Any], world: int, *args: Any, timeout: float) -> None:
    """Runs a job that ends with the death of all ranks."""
    with pytest.raises(RanksFailed) as failed:
        run_ranks(job, world, *args, timeout=timeout)
    assert [report.exit_code for report in failed.value.reports] == [-signal.SIGKILL] * world, str(failed.value)


def faults(folder: Path, index: int, run: Run, rank: int) -> list[str]:
    """What is wrong with what a rank read of a run before it was killed and afterwards, in words."""
    uninterrupted, broken, resumed = (
        compared(run.kind, read_journal(folder, f"{life}-{index}", rank)) for life in ("whole", "broken", "resumed")
    )
    steps = steps_before(run.saved, len(uninterrupted[run.epoch]))
    before = {epoch: uninterrupted[epoch] for epoch in range(run.epoch)} | {run.epoch: uninterrupted[run.epoch][:steps]}
    after = [uninterrupted[run.epoch][steps:], uninterrupted[run.epoch + 1], uninterrupted[run.epoch + 2]]
    expected = after[1:] if run.saved == "end" else after[:2]
    found = []
    if broken != {epoch: ids for epoch, ids in before.items() if ids}:
        found.append(f"rank {rank} read {broken} before it was killed, instead of {before}")
    if [resumed.get(epoch, []) for epoch in range(2)] != expected:
        found.append(f"rank {rank} went on with {resumed} instead of {expected}")
    return found


def compared(kind: str, epochs: dict[int, list[Step]]) -> dict[int, list[Any]]:
    """What has to be equal. Where one rank reads for all, what fills up the last step are the first rows that it has read."""
    return {epoch: [step[1] if kind in DISPATCHED else step for step in steps] for epoch, steps in epochs.items()}


def assert_resumed_runs_equal_uninterrupted_ones(
    folder: Path, runs: Sequence[Run], world: int, timeout: float = 100
) -> None:
    killed(first_life, world, folder, runs, BATCH, timeout=timeout)
    run_ranks(second_life, world, folder, runs, BATCH, timeout=timeout)
    wrong = {run: [text for rank in range(world) for text in faults(folder, index, run, rank)] for index, run in enumerate(runs)}
    texts = [f"{run}\n    " + "\n    ".join(found) for run, found in wrong.items() if found]
    assert not texts, f"{len(texts)} of {len(runs)} runs:\n" + "\n".join(texts[:10])


@pytest.mark.parametrize("world", [1, 2, 4])
def test_killed_runs_go_on_in_new_processes_as_if_nothing_had_happened(world: int, tmp_path: Path) -> None:
    """R1, sampled pairwise."""
    assert_resumed_runs_equal_uninterrupted_ones(tmp_path, sampled(world), world)


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("kind", LOADERS)
@pytest.mark.parametrize("world", [1, 2, 4])
def test_killed_runs_of_the_whole_product_go_on(world: int, kind: str, tmp_path: Path) -> None:
    """R1."""
    assert_resumed_runs_equal_uninterrupted_ones(tmp_path, whole(kind), world, timeout=3600)


LEGS = (4, 2, 1, 4)
CHAINS = [
    *(Chain(kind, global_batch=8) for kind in LOADERS if kind != "own batches that vary"),
    *(Chain(kind, global_batch=8, split=True) for kind in ("shuffled", "own sampler, torch", "stream", "shared stream")),
    *(Chain(kind) for kind in LOADERS if kind != "own batches that vary"),
    Chain("own batches that vary", batch=1),
]


@pytest.mark.timeout(240)
def test_other_numbers_of_processes_read_every_sample_once_and_in_the_same_order(tmp_path: Path) -> None:
    """R2: 4, 2, 1, and 4 processes; with the same global batch, and with as large a batch for each process."""
    for number, world in enumerate(LEGS):
        last = number + 1 == len(LEGS)
        run = run_ranks if last else killed
        run(leg, world, tmp_path, CHAINS, number, last, timeout=100)
    wrong = {chain: text for index, chain in enumerate(CHAINS) if (text := faults_of_chain(tmp_path, index, chain))}
    assert not wrong, "\n".join(f"{chain}: {text}" for chain, text in wrong.items())


def faults_of_chain(folder: Path, index: int, chain: Chain) -> str:
    """What is wrong with what the legs of a chain read, in words."""
    uninterrupted = {epoch: gathered(steps) for epoch, steps in read_journal(folder, f"whole-{index}", 0).items()}
    legs = [read_journal(folder, f"leg-{number}-{index}", 0) for number in range(len(LEGS))]
    found = {0: [step for one in legs for step in gathered(one.get(0, []))], 1: gathered(legs[-1].get(1, []))}
    same = found == uninterrupted if chain.global_batch else flat(found[0]) == flat(uninterrupted[0])
    once = all(len(flat(uninterrupted[epoch])) == len(flat(found[epoch])) == SAMPLES for epoch in (0, 1))
    same_samples = sorted(flat(found[1])) == sorted(flat(uninterrupted[1]))
    return "" if same and once and same_samples else f"{found} instead of {uninterrupted}"


def gathered(steps: Sequence[Step]) -> list[list[int]]:
    return [ids for _, ids in steps]


def flat(steps: Sequence[list[int]]) -> list[int]:
    return [sample for step in steps for sample in step]
