"""A run goes on from `save_state` in new processes as if it had not been interrupted."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from resume_job import LOADERS, SAVED, WORKERS, Run, steps_before
from resume_parts_job import (
    LEG,
    STEPS,
    draws_behind_two_loads,
    go_on_far_inside,
    go_on_near_the_end,
    leg,
    load_schedules,
    save_in_the_second_epoch,
    save_near_the_end,
    save_schedules,
    skip_by_hand,
)
from resume_state_job import first_life, read, second_life
from test_resume import DISPATCHED, killed, pairwise, possible

from accel_testing import run_ranks

BATCH = 2
SAMPLED = 40
KINDS = tuple(kind for kind in LOADERS if kind != "nodes")  # torchdata's pipeline puts batches together in its own way
ALWAYS = [
    Run("in turn", "none", "last", 1),  # nothing is left of the epoch
    Run("own batches that vary", "persistent", "end", 2, seeded=False),  # workers that the run had already are started
    Run("stream", "none", "k", 1),
    Run("shared stream", "two", "last", 1),
    Run("tape", "none", "end", 2),  # the dataset ends once more before it begins
]
"""What begins an epoch draws from the streams of the process: here that was, or is, drawn at other times."""
CHOICES: tuple[Sequence[Any], ...] = (KINDS, WORKERS, SAVED, (0, 1, 2), (True, False), (1, 2, 4))


def sampled(world: int) -> list[Run]:
    """The runs that are made by default; those whose workers live on come last, and are killed with them."""
    runs = [Run(*run) for *run, size in pairwise(CHOICES, SAMPLED) if size == world]
    return sorted(
        filter(possible, [*(ALWAYS if world <= 2 else []), *runs]), key=lambda run: WORKERS.index(run.workers)
    )


def faults(folder: Path, index: int, run: Run, rank: int, exact: bool) -> list[str]:
    """What is wrong with what a rank made of a run before it was killed and afterwards, in words."""
    uninterrupted, broken, resumed = (read(folder, f"{life}-{index}", rank) for life in ("whole", "broken", "resumed"))
    steps = steps_before(run.saved, len(uninterrupted[run.epoch]))
    before = [*uninterrupted[: run.epoch], *([uninterrupted[run.epoch][:steps]] if run.saved != "0" else [])]
    after = [uninterrupted[run.epoch][steps:], *uninterrupted[run.epoch + 1 :]]
    expected = after[1:3] if run.saved == "end" else after[:2]
    equal = len(expected[0]) + len(expected[1])
    if run.kind in DISPATCHED and steps > 0 and run.saved != "end":
        # One rank reads for all. It fills the last step up with the first rows that it has read, which now are others.
        equal = len(expected[0]) - 1
    elif run.kind == "StatefulDataLoader of a tape":
        equal = 0  # torchdata makes two iterators where it begins from a state, and each draws a seed for its workers
    found = {
        "before": difference(broken, before, sum(map(len, before)), exact=True),
        "after": difference(resumed, expected, equal, exact),
    }
    return [f"rank {rank} {when}: {text}" for when, text in found.items() if text]


def difference(found: Sequence[list[Any]], wanted: Sequence[list[Any]], equal: int, exact: bool) -> str:
    """Where what was made differs, in words; behind the `equal` first steps, what a rank reads itself may differ, and losses."""
    if [len(steps) for steps in found] != [len(steps) for steps in wanted]:
        return f"epochs of {[len(steps) for steps in found]} steps instead of {[len(steps) for steps in wanted]}"
    pairs = zip(itertools.chain(*found), itertools.chain(*wanted), strict=True)
    for step, ((ids, *one, loss, rate, count), (other_ids, *other, other_loss, other_rate, other_count)) in enumerate(
        pairs
    ):
        same = (one, rate, count) == (other, other_rate, other_count)
        if step < equal:
            same = same and ids == other_ids and loss == (other_loss if exact else pytest.approx(other_loss, rel=1e-4))
        if not same:
            there = [other_ids, *other, other_loss, other_rate, other_count]
            return f"step {step}: {[ids, *one, loss, rate, count]} instead of {there}"
    return ""


def assert_resumed_runs_equal_uninterrupted_ones(
    folder: Path, runs: Sequence[Run], world: int, timeout: float = 140
) -> None:
    killed(first_life, world, folder, runs, BATCH, timeout=timeout)
    run_ranks(second_life, world, folder, runs, BATCH, timeout=timeout)
    # DDP puts gradients into buckets of another order from its second step on, so that of more than two they are summed in
    # another order: a process that has just begun differs by a last bit from one that has not.
    exact = world <= 2
    wrong = {
        run: [text for rank in range(world) for text in faults(folder, index, run, rank, exact)]
        for index, run in enumerate(runs)
    }
    texts = [f"{run}\n    " + "\n    ".join(found) for run, found in wrong.items() if found]
    assert not texts, f"{len(texts)} of {len(runs)} runs:\n" + "\n".join(texts[:10])


@pytest.mark.timeout(300)
@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.full), 2, pytest.param(4, marks=pytest.mark.full)])
def test_killed_runs_train_on_in_new_processes_as_if_nothing_had_happened(world: int, tmp_path: Path) -> None:
    """Sampled pairwise: samples, losses bit for bit, learning rates, and the user's own counter.

    Augmentation that this process draws when the loop asks for a batch goes on too. What is drawn ahead of the loop does not:
    streams of workers begin anew with an iteration, and so does what a stream or the reader of a dispatched loader draws.
    """
    assert_resumed_runs_equal_uninterrupted_ones(tmp_path, sampled(world), world)


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world", [1, 2, 4])
def test_killed_runs_of_the_whole_product_train_on(world: int, kind: str, tmp_path: Path) -> None:
    runs = list(filter(possible, itertools.starmap(Run, itertools.product((kind,), *CHOICES[1:-1]))))
    assert_resumed_runs_equal_uninterrupted_ones(tmp_path, runs, world, timeout=3600)


LEGS = (4, 2, 1, 4)


@pytest.mark.timeout(240)
def test_other_numbers_of_processes_train_on_the_same_batches(tmp_path: Path) -> None:
    """Samples and rates are those of the uninterrupted run, losses are up to the order of sums, and nothing is lost."""
    for number, world in enumerate(LEGS):
        last = number + 1 == len(LEGS)
        (run_ranks if last else killed)(leg, world, tmp_path, number, last, timeout=60)
        if number == 2:  # one process has saved
            drawn = run_ranks(draws_behind_two_loads, 4, tmp_path)
    noted = lambda title: json.loads((tmp_path / f"{title}.json").read_text())
    for number in range(1, len(LEGS)):
        assert noted(f"loaded-{number}") == noted(f"saved-{number - 1}")

    whole, found = noted("whole"), [step for number in range(len(LEGS)) for step in noted(f"leg-{number}")]
    assert len(found) == len(whole) == STEPS
    # What was gathered, the rate, and the user's count.
    assert [[step[1], *step[3:]] for step in found] == [[step[1], *step[3:]] for step in whole]
    assert [step[2] for step in found[:LEG]] == [step[2] for step in whole[:LEG]]
    of_four = [*range(LEG), *range(3 * LEG, STEPS)]  # the loss is that of the rows of rank 0
    assert [found[at][2] for at in of_four] == pytest.approx([whole[at][2] for at in of_four], rel=1e-4)
    first_epoch = [sample for step in found[:5] for sample in step[1]]
    assert sorted(first_epoch) == list(range(40))

    # A rank that the saved world did not have draws what seed, rank and step say, and not what it drew before.
    assert all(behind_one == behind_other for behind_one, behind_other in drawn)
    for stream in range(3):
        assert len({behind[0][stream] for behind in drawn}) == 4


@pytest.mark.timeout(240)
def test_the_rates_of_every_schedule_go_on(tmp_path: Path) -> None:
    """Saved at the end of a window and inside one, on as many processes and on another number."""
    whole = run_ranks(save_schedules, 2, tmp_path)
    for world in (2, 1):
        for rank, found in enumerate(run_ranks(load_schedules, world, tmp_path)):
            for name, by_place in found.items():
                assert len({rate for rate, _ in whole[rank][name]}) > 3
                for steps, rest in by_place.items():
                    assert rest == whole[rank][name][steps:], f"{name}, saved behind {steps}, on {world}"


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_run_saved_at_batch_one_million_goes_on_without_reading_a_skipped_sample(
    shuffle: bool, tmp_path: Path
) -> None:
    million = 10**6
    [(ids, read_for_it, position)] = run_ranks(go_on_far_inside, 1, tmp_path, million, shuffle)
    assert ids == read_for_it
    assert len(set(ids)) == 8
    assert position == 8 * (million + 1)
    assert shuffle or ids == list(range(8 * million, 8 * million + 8))


def test_metrics_are_exact_in_a_last_global_batch_that_was_begun_by_fewer_processes(tmp_path: Path) -> None:
    """One of 29 samples is left, which two and four processes fill up."""
    run_ranks(save_near_the_end, 1, tmp_path)
    [rest] = run_ranks(go_on_near_the_end, 1, tmp_path)
    assert len(rest[0]) == 1
    for world in (2, 4):
        for left, following in run_ranks(go_on_near_the_end, world, tmp_path):
            assert left == rest[0]
            assert sorted(following) == list(range(29))


def test_skipping_by_hand_behind_a_load_trains_on_in_the_same_place(tmp_path: Path) -> None:
    """A script that counts its steps, and loads as well: samples, losses and rates are those of a run that went on."""
    for world, steps in ((1, 3), (2, 2)):
        uninterrupted = run_ranks(save_in_the_second_epoch, world, tmp_path / str(world), steps)
        assert run_ranks(skip_by_hand, world, tmp_path / str(world), steps) == uninterrupted
