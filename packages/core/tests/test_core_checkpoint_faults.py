"""R3: whatever happens during a save, the previous checkpoint or the new one is there, and every rank hears of it."""

from __future__ import annotations

import contextlib
import itertools
import os
import resource
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest
from checkpoint_jobs import (
    SOON,
    Training,
    arm,
    assert_clean,
    automatic,
    error_of,
    fingerprint_after,
    forked,
    names_in,
    value_of,
)

from accel_core.checkpoint import retention
from accel_core.testing import run_ranks

# A kill at every operation on the disk, in a world of one

OLD, NEW, NEXT = 2, 3, 4
"""Steps: of the checkpoint that is there, of the save that is killed, and of the one after it."""


def save_and_be_killed(folder, number, mode):
    training = Training()
    training.step(OLD)
    training.accelerator.save_state(folder)
    training.step(NEW - OLD)
    arm(number)
    training.accelerator.save_state(folder, asynchronous=mode)
    training.step()
    training.accelerator.wait_for_checkpoint()


def load_and_save_again(folder):
    """What a new process finds, and after it saved the next step there."""
    training = Training()
    training.accelerator.load_state(folder)
    found = training.fingerprint()
    training.step(NEXT - found[0])
    training.accelerator.save_state(folder)
    assert_clean(folder)
    return found, loaded_from(folder)


def loaded_from(folder):
    training = Training()
    training.accelerator.load_state(folder)
    return training.fingerprint()


def save_by_name_and_be_killed(folder, number, mode):
    training = Training(project=automatic(folder))
    training.step(OLD)
    training.accelerator.save_state()
    training.step(NEW - OLD)
    arm(number)
    training.accelerator.save_state(asynchronous=mode)
    training.step()
    training.accelerator.wait_for_checkpoint()


def load_newest_and_save_again(folder):
    training = Training(project=automatic(folder))
    training.accelerator.load_state()
    found = training.fingerprint()
    training.step(NEXT - found[0])
    training.accelerator.save_state()
    (name,) = names_in(folder / "checkpoints")
    assert_clean(folder / "checkpoints" / name)
    return found, loaded_from(folder / "checkpoints" / name)


def kill_at_every_operation(folder, save, check, mode, stride):
    """Kills a save at each of its operations in turn, or at each `stride`-th: the steps of what was found each time."""
    expected = {steps: value_of(fingerprint_after, steps) for steps in (OLD, NEW, NEXT)}
    steps = []
    for number in itertools.count(0, stride):
        place = folder / str(number)
        (ended,) = forked(save, 1, place, number, mode)
        assert ended.code in (0, -signal.SIGKILL), ended.output
        found, after = value_of(check, place)
        assert found == expected[found[0]]
        assert after == expected[NEXT]
        steps.append(found[0])
        if ended.code == 0:
            return steps


def assert_killed_everywhere(steps, at_least):
    assert [step for step, _ in itertools.groupby(steps)] == [OLD, NEW]
    assert len(steps) > at_least


def stride(mode):
    """What is written behind is written by the same code: a sample will do."""
    return 1 if mode is False or "ACCEL_SOAK" in os.environ else 4


@pytest.mark.parametrize("mode", [False, "eager", "lazy"])
def test_a_kill_at_any_moment_of_a_save_leaves_the_previous_checkpoint_or_the_new_one(tmp_path, mode):
    jobs = save_and_be_killed, load_and_save_again
    (steps,) = run_ranks(kill_at_every_operation, 1, tmp_path, *jobs, mode, stride(mode), timeout=100)
    assert_killed_everywhere(steps, at_least=24 // stride(mode))


@pytest.mark.parametrize("mode", [False, "eager"])
def test_a_kill_never_leaves_a_run_that_keeps_one_checkpoint_without_any(tmp_path, mode):
    jobs = save_by_name_and_be_killed, load_newest_and_save_again
    (steps,) = run_ranks(kill_at_every_operation, 1, tmp_path, *jobs, mode, stride(mode), timeout=100)
    assert_killed_everywhere(steps, at_least=24 // stride(mode))


# A kill of one of two ranks


def save_on_two_and_kill_one(folder, victim, number, mode):
    training = Training()
    training.step(OLD)
    training.accelerator.save_state(folder)
    training.step(NEW - OLD)
    if training.accelerator.process_index == victim:
        arm(number)
    training.accelerator.save_state(folder, asynchronous=mode)
    training.step()
    training.accelerator.wait_for_checkpoint()


def save_on_two(folder, steps):
    training = Training()
    with contextlib.suppress(FileNotFoundError):
        training.accelerator.load_state(folder)
    training.step(steps - training.counter.value)
    training.accelerator.save_state(folder)
    training.accelerator.end_training()
    return training.counter.value


def kill_one_of_two(folder, victim, numbers, mode):
    """The steps of what is found after the victim was killed at each of some operations; the other rank ended soon."""
    steps = []
    for number in numbers:
        place = folder / str(number)
        ends = forked(save_on_two_and_kill_one, 2, place, victim, number, mode)
        assert ends[victim].code == -signal.SIGKILL, ends[victim].output
        other = ends[1 - victim]
        assert other.code not in (0, -signal.SIGKILL), f"it did not end within {SOON} s:\n{other.output}"
        assert f"rank {victim}" in other.output
        steps.append(value_of(steps_in, place))
        assert [ended.value for ended in forked(save_on_two, 2, place, NEXT)] == [NEXT, NEXT]
        assert_clean(place)
    return steps


def steps_in(folder):
    return loaded_from(folder)[0]


@pytest.mark.parametrize("mode", [False, "eager"])
@pytest.mark.parametrize(("victim", "numbers"), [(0, (0, 3, 7, 11, 17, 22)), (1, (0, 1, 2, 3, 4, 5))])
def test_a_rank_that_is_killed_in_a_save_ends_the_other_and_leaves_a_checkpoint(tmp_path, victim, numbers, mode):
    (steps,) = run_ranks(kill_one_of_two, 1, tmp_path, victim, numbers, mode, timeout=110)
    assert [step for step, _ in itertools.groupby(steps)] in ([OLD], [OLD, NEW])
