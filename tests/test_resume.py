"""Loaders go on where killed processes saved them, on any number of processes, and read nothing for it."""

from __future__ import annotations

import itertools
import random
import signal
from collections.abc import Callable, Iterator, Sequence
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
    Tape,
    first_life,
    leg,
    read_journal,
    second_life,
    steps_before,
)
from torch.utils.data import DataLoader, Dataset, Sampler

from accel_core import Accelerator
from accel_testing import RanksFailed, run_ranks
from accel_testing.memory_peaks import PEAKS_ARE_MEASURED, extra_memory

BATCH = 2
EVERYTHING = list(range(SAMPLES))
SAMPLED = 68
CHOICES: tuple[Sequence[Any], ...] = (tuple(LOADERS), WORKERS, SAVED, (0, 1, 2), (True, False), (1, 2, 4))
STREAMS = {"stream", "tape", "StatefulDataLoader of a tape", "nodes"}
DISPATCHED = STREAMS | {kind for kind in LOADERS if "dispatched" in kind}


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
    """The runs that are made by default; those whose workers live on come last, and are killed with them."""
    runs = [Run(*run) for *run, size in pairwise(CHOICES, SAMPLED) if size == world]
    return sorted(filter(possible, runs), key=lambda run: WORKERS.index(run.workers))


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
    journals = [read_journal(folder, f"{life}-{index}", rank) for life in ("whole", "broken", "resumed")]
    uninterrupted, broken, resumed = (compared(run.kind, journal) for journal in journals)
    steps = steps_before(run.saved, len(uninterrupted[run.epoch]))
    before = {epoch: uninterrupted[epoch] for epoch in range(run.epoch)} | {run.epoch: uninterrupted[run.epoch][:steps]}
    after = [uninterrupted[run.epoch][steps:], uninterrupted[run.epoch + 1], uninterrupted[run.epoch + 2]]
    expected = after[1:] if run.saved == "end" else after[:2]
    found = []
    if run.kind != "weighted" and any(sorted(flat(gathered(steps))) != EVERYTHING for steps in journals[0].values()):
        found.append(f"rank {rank} read {uninterrupted} without an interruption: not every sample once")
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
    wrong = {
        run: [text for rank in range(world) for text in faults(folder, index, run, rank)]
        for index, run in enumerate(runs)
    }
    texts = [f"{run}\n    " + "\n    ".join(found) for run, found in wrong.items() if found]
    assert not texts, f"{len(texts)} of {len(runs)} runs:\n" + "\n".join(texts[:10])


@pytest.mark.timeout(300)
@pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.full), pytest.param(4, marks=pytest.mark.full)])
def test_killed_runs_go_on_in_new_processes_as_if_nothing_had_happened(world: int, tmp_path: Path) -> None:
    """Sampled pairwise."""
    assert_resumed_runs_equal_uninterrupted_ones(tmp_path, sampled(world), world)


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("kind", LOADERS)
@pytest.mark.parametrize("world", [1, 2, 4])
def test_killed_runs_of_the_whole_product_go_on(world: int, kind: str, tmp_path: Path) -> None:
    assert_resumed_runs_equal_uninterrupted_ones(tmp_path, whole(kind), world, timeout=3600)


LEGS = (4, 2, 1, 4)
CHAINS = [
    *(Chain(kind, global_batch=8) for kind in LOADERS if kind != "own batches that vary"),
    *(
        Chain(kind, global_batch=8, split=True)
        for kind in ("shuffled", "own sampler, torch", "stream", "shared stream")
    ),
    *(Chain(kind) for kind in LOADERS if kind != "own batches that vary"),
    Chain("own batches that vary", batch=1),
]


@pytest.mark.timeout(240)
def test_other_numbers_of_processes_read_every_sample_once_and_in_the_same_order(tmp_path: Path) -> None:
    """4, 2, 1, and 4 processes; with the same global batch, and with as large a batch for each process."""
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


class Recorded(Dataset[int]):
    """A huge dataset that says which samples were read."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.reads: list[int] = []

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        self.reads.append(index)
        return index


class Odd(Sampler[int]):
    """A sampler of the user's own, over the odd indices."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __iter__(self) -> Iterator[int]:
        return iter(range(1, 2 * self.samples, 2))


class CountingTape(Tape):
    """A stream with a state, that says which samples were read."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[int] = []

    def __iter__(self) -> Iterator[int]:
        for sample in super().__iter__():
            self.reads.append(sample)
            yield sample


MILLION = 10**6


@pytest.mark.parametrize("shuffle", [False, True])
def test_going_on_at_batch_one_million_reads_no_skipped_sample(shuffle: bool) -> None:
    """The first batch behind a million of them is all that is read; by a state and by skipping it is the same."""
    found = []
    for skip in (False, True):
        accelerator, dataset = Accelerator(cpu=True), Recorded(10**9)
        loader = accelerator.prepare(DataLoader(dataset, 8, shuffle=shuffle))
        if skip:
            found.append(next(iter(accelerator.skip_first_batches(loader, MILLION))).tolist())
        else:
            loader.load_state_dict({**loader.state_dict(), "samples": 8 * MILLION})
            found.append(next(iter(loader)).tolist())
        assert dataset.reads == found[-1]
        assert loader.state_dict()["samples"] == 8 * (MILLION + 1)
    assert found[0] == found[1]
    assert len(set(found[0])) == 8
    assert shuffle or found[0] == list(range(8 * MILLION, 8 * MILLION + 8))


def go_on_in_the_middle_of_a_huge_set() -> int:
    """Bytes that going on takes beside what there is, behind a first time in a set that is shuffled alike."""

    def go_on(samples: int, at: int) -> None:
        loader = Accelerator(cpu=True).prepare(DataLoader(Recorded(samples), 8, shuffle=True))
        loader.load_state_dict({**loader.state_dict(), "samples": 8 * at})
        next(iter(loader))

    go_on(10**5, 1)
    return extra_memory(lambda: go_on(10**9, MILLION))


@pytest.mark.skipif(not PEAKS_ARE_MEASURED, reason="the kernel does not measure peaks")
def test_going_on_in_the_middle_of_a_huge_set_takes_no_memory() -> None:
    """No order of all samples is made."""
    [extra] = run_ranks(go_on_in_the_middle_of_a_huge_set, 1)
    assert extra <= 2**20


def test_a_sampler_of_the_users_own_is_asked_for_what_is_skipped_but_no_sample_is_read() -> None:
    dataset = Recorded(MILLION)
    loader = Accelerator(cpu=True).prepare(DataLoader(dataset, 8, sampler=Odd(MILLION // 2)))
    loader.load_state_dict({**loader.state_dict(), "samples": 8 * 50_000})
    assert next(iter(loader)).tolist() == dataset.reads == list(range(800_001, 800_017, 2))


def test_a_stream_with_a_state_goes_on_from_it_without_reading_what_was_skipped() -> None:
    """For datasets with a position of their own."""
    state = read_three_batches(CountingTape()).state_dict()
    tape = CountingTape()
    loader = Accelerator(cpu=True).prepare(DataLoader(tape, 2))
    loader.load_state_dict(state)
    rest = [sample for batch in loader for sample in batch.tolist()]
    assert rest == tape.reads == CountingTape().ids()[6:]


def read_three_batches(tape: Tape) -> Any:
    loader = Accelerator(cpu=True).prepare(DataLoader(tape, 2))
    for _ in itertools.islice(loader, 3):
        pass
    return loader


def metrics_behind_a_skip(options: dict[str, Any]) -> dict[str, list[list[int]]]:
    """On two ranks, 29 samples in global batches of 8, whose end is ragged."""
    accelerator = Accelerator(cpu=True, **options)
    gathered = lambda loader: [accelerator.gather_for_metrics(batch).tolist() for batch in loader]
    found = {}
    loader = accelerator.prepare(DataLoader(range(29), 4))
    for skipped in (2, 3, 4):
        found[f"skipped {skipped}"] = gathered(accelerator.skip_first_batches(loader, skipped))
        found[f"after skipping {skipped}"] = gathered(loader)
    loader.load_state_dict({**loader.state_dict(), "epoch": 9, "samples": 16})
    found["loaded"] = gathered(loader)
    found["after loading"] = gathered(loader)
    return found


@pytest.mark.parametrize("options", [{}, {"dispatch_batches": True}], ids=["sharded", "dispatched"])
def test_metrics_are_exact_behind_a_skip_and_the_next_epoch_is_whole(options: dict[str, Any]) -> None:
    steps = [list(range(start, min(start + 8, 29))) for start in range(0, 29, 8)]
    for found in run_ranks(metrics_behind_a_skip, 2, options):
        for skipped in (2, 3, 4):
            assert found[f"skipped {skipped}"] == steps[skipped:]
            assert found[f"after skipping {skipped}"] == steps
        assert found["loaded"] == steps[2:]
        assert found["after loading"] == steps
