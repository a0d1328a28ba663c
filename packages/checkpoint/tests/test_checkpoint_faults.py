"""Whatever happens during a save, the previous checkpoint or the new one is there, and every rank hears of it."""

from __future__ import annotations

import contextlib
import itertools
import os
import resource
import signal
import subprocess
import threading
import time

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
    forked_together,
    names_in,
    value_of,
)

from accel_testing import run_ranks

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


TOGETHER = 8
"""Processes at a time."""


def kill_at_every_operation(folder, save, check, mode, stride):
    """Kills a save at each of its operations in turn, or at each `stride`-th: the steps of what was found each time."""
    expected = {steps: value_of(fingerprint_after, steps) for steps in (OLD, NEW, NEXT)}
    steps, codes = [], []
    while 0 not in codes:
        numbers = [stride * number for number in range(len(codes), len(codes) + TOGETHER)]
        places = [folder / str(number) for number in numbers]
        killed = forked_together([(save, *job, mode) for job in zip(places, numbers, strict=True)], 1)
        for (checked,) in forked_together([(check, place) for place in places], 1):
            assert checked.code == 0, checked.output
            found, after = checked.value
            assert found == expected[found[0]]
            assert after == expected[NEXT]
            steps.append(found[0])
        codes += [ended.code for (ended,) in killed]
        assert set(codes) <= {0, -signal.SIGKILL}, killed
    return steps[: codes.index(0) + 1]


def assert_killed_everywhere(steps, at_least):
    assert [step for step, _ in itertools.groupby(steps)] == [OLD, NEW]
    assert len(steps) > at_least


in_full = pytest.mark.full
SAMPLE = 1 if "ACCEL_SOAK" in os.environ else 4
"""Every which operation is the last one, where a sample will do: what is written behind is written by the same code."""


@pytest.mark.parametrize(
    ("mode", "stride"),
    [
        (False, SAMPLE),
        pytest.param("eager", SAMPLE, marks=in_full),
        ("lazy", SAMPLE),
        pytest.param(False, 1, marks=in_full),
    ],
)
def test_a_kill_at_any_moment_of_a_save_leaves_the_previous_checkpoint_or_the_new_one(tmp_path, mode, stride):
    jobs = save_and_be_killed, load_and_save_again
    (steps,) = run_ranks(kill_at_every_operation, 1, tmp_path, *jobs, mode, stride, timeout=100)
    assert_killed_everywhere(steps, at_least=24 // stride)


@pytest.mark.parametrize(
    ("mode", "stride"),
    [(False, SAMPLE), pytest.param("eager", SAMPLE, marks=in_full), pytest.param(False, 1, marks=in_full)],
)
def test_a_kill_never_leaves_a_run_that_keeps_one_checkpoint_without_any(tmp_path, mode, stride):
    jobs = save_by_name_and_be_killed, load_newest_and_save_again
    (steps,) = run_ranks(kill_at_every_operation, 1, tmp_path, *jobs, mode, stride, timeout=100)
    assert_killed_everywhere(steps, at_least=24 // stride)


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
    places = [folder / str(number) for number in numbers]
    jobs = [(save_on_two_and_kill_one, place, victim, int(place.name), mode) for place in places]
    for place, ends in zip(places, forked_together(jobs, 2), strict=True):
        assert ends[victim].code == -signal.SIGKILL, ends[victim].output
        other = ends[1 - victim]
        assert other.code not in (0, -signal.SIGKILL), f"it did not end within {SOON} s:\n{other.output}"
        assert f"rank {victim}" in other.output
        steps.append(value_of(steps_in, place))
    for place, ends in zip(places, forked_together([(save_on_two, place, NEXT) for place in places], 2), strict=True):
        assert [ended.value for ended in ends] == [NEXT, NEXT]
        assert_clean(place)
    return steps


def steps_in(folder):
    return loaded_from(folder)[0]


@pytest.mark.parametrize(
    ("victim", "numbers", "mode"),
    [
        (0, (0, 3, 7, 11, 17, 22), False),
        (1, (0, 1, 2, 3, 4, 5), "eager"),
        pytest.param(0, (0, 3, 7, 11, 17, 22), "eager", marks=in_full),
        pytest.param(1, (0, 1, 2, 3, 4, 5), False, marks=in_full),
    ],
)
def test_a_rank_that_is_killed_in_a_save_ends_the_other_and_leaves_a_checkpoint(tmp_path, victim, numbers, mode):
    (steps,) = run_ranks(kill_one_of_two, 1, tmp_path, victim, numbers, mode, timeout=110)
    assert [step for step, _ in itertools.groupby(steps)] in ([OLD], [OLD, NEW])


# A full disk

WIDTH = 256
"""Of a layer: a rank writes some tens of kilobytes."""


@contextlib.contextmanager
def file_size_limit(nbytes):
    """No file of this process grows beyond `nbytes`: a disk that is full for it alone."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def save_while_one_rank_cannot_write(folder, rank, mode):
    """What every rank heard, how long that took, and what was there afterwards."""
    training = Training(WIDTH)
    accelerator = training.accelerator
    training.step(OLD)
    accelerator.save_state(folder)
    training.step(NEW - OLD)
    start = time.monotonic()
    with file_size_limit(4096) if accelerator.process_index == rank else contextlib.nullcontext():
        said = error_of(lambda: save_and_wait(accelerator, folder, mode))
    seconds = time.monotonic() - start
    accelerator.save_state(folder / "elsewhere")
    training.accelerator.load_state(folder)
    previous = training.counter.value
    training.accelerator.load_state(folder / "elsewhere")
    accelerator.save_state(folder)
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        (folder / "elsewhere" / "manifest.json").unlink()
        _, data = [name for name in sorted(names_in(folder), reverse=True) if name != "elsewhere"]
        assert not [name for name in names_in(folder / data) if not name.endswith(("index.json", ".safetensors"))]
    training.accelerator.load_state(folder)
    assert threading.active_count() <= 3, threading.enumerate()
    return said, seconds, previous, training.counter.value


def save_and_wait(accelerator, folder, mode):
    accelerator.save_state(folder, asynchronous=mode)
    accelerator.wait_for_checkpoint()


@pytest.mark.parametrize("mode", [False, "eager", "lazy"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_cannot_write_makes_the_save_fail_on_all_and_leaves_the_previous(tmp_path, rank, mode):
    first, second = run_ranks(save_while_one_rank_cannot_write, 2, tmp_path, rank, mode)
    assert first[0] == second[0]
    assert first[0].startswith("OSError: [Errno 27] ")
    assert "File too large" in first[0]
    assert f"rank-0000{rank}.safetensors'" in first[0]
    assert f"(on rank {rank})" in first[0]
    assert max(first[1], second[1]) < 10
    assert first[2:] == second[2:] == (OLD, NEW)


def fail_and_ask(folder, rank, mode, way):
    """The error of a save that is written behind, as the next call that may tell of it raises it."""
    training = Training(WIDTH)
    accelerator = training.accelerator
    with file_size_limit(4096) if accelerator.process_index == rank else contextlib.nullcontext():
        began = error_of(lambda: accelerator.save_state(folder, asynchronous=mode))
        said = error_of({"save": lambda: accelerator.save_state(folder), "end": accelerator.end_training}[way])
    again = None if way == "end" else error_of(accelerator.wait_for_checkpoint)
    return began, said, again


@pytest.mark.parametrize(("mode", "rank", "way"), [("eager", 0, "end"), ("lazy", 1, "save"), ("eager", 1, "end")])
def test_a_failure_behind_is_told_once_by_the_next_save_or_the_end_of_the_training(tmp_path, mode, rank, way):
    for began, said, again in run_ranks(fail_and_ask, 2, tmp_path, rank, mode, way):
        assert began is None
        assert said.startswith("OSError: [Errno 27] ")
        assert f"rank-0000{rank}.safetensors'" in said
        assert again is None


def fail_and_never_ask(folder):
    training = Training(WIDTH)
    with file_size_limit(4096):
        training.accelerator.save_state(folder, asynchronous=True)
        for thread in threading.enumerate():
            if thread.name == "accel checkpoint":
                thread.join()


def never_ask(folder):
    (ended,) = forked(fail_and_never_ask, 1, folder)
    return ended.output


def test_a_failure_behind_that_nobody_asks_for_is_told_at_the_end_of_the_process(tmp_path):
    (output,) = run_ranks(never_ask, 1, tmp_path)
    assert f"The checkpoint in {tmp_path} was not saved: [Errno 27]" in output


@pytest.fixture
def small_disk(tmp_path):
    """A file system of half a megabyte."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounting = ["mount", "-t", "tmpfs", "-o", "size=512k", "none", str(folder)]
    done = subprocess.run(mounting, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"nothing can be mounted here: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


PAGE = 4096


def save_on_a_disk_that_is_full(disk, rooms, mode):
    """For each number of pages that are left: what the ranks heard, the seconds, and what is there before and after."""
    training = Training(WIDTH)
    accelerator = training.accelerator
    folder = disk / "checkpoint"
    training.step(OLD)
    accelerator.save_state(folder)
    found = []
    for room in rooms:
        training.step(NEW - training.counter.value)
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            fill_up(disk, room)
        accelerator.wait_for_everyone()
        start = time.monotonic()
        said = error_of(lambda: save_and_wait(accelerator, folder, mode))
        seconds = time.monotonic() - start
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            (disk / "filler").unlink()
        accelerator.load_state(folder)
        previous = training.counter.value
        training.step(NEW - previous)
        accelerator.save_state(folder)
        accelerator.load_state(folder)
        again = training.counter.value
        assert_clean(folder)
        found.append((said, seconds, previous, again))
        accelerator.load_state(folder)
        training.counter.value = OLD
        accelerator.save_state(folder)
    return found


def fill_up(disk, room):
    """Leaves so many pages."""
    state = os.statvfs(disk)
    (disk / "filler").write_bytes(bytes((state.f_bavail - room) * PAGE))
    assert os.statvfs(disk).f_bavail == room


@pytest.mark.parametrize("mode", [False, pytest.param("eager", marks=in_full), pytest.param("lazy", marks=in_full)])
def test_a_full_disk_makes_the_save_fail_on_all_ranks_and_leaves_the_previous(small_disk, mode):
    rooms = (0, 1, 2, 5, 8, 9, 10, 11, 12, 13, 17)
    first, second = run_ranks(save_on_a_disk_that_is_full, 2, small_disk, rooms, mode)
    assert [each[0] for each in first] == [each[0] for each in second]
    for said, seconds, previous, again in (*first, *second):
        assert seconds < 10
        assert again == NEW
        if said is None:
            assert previous == NEW
        else:
            assert previous == OLD
            assert said.startswith("OSError: [Errno 28] ")
            assert "No space left on device" in said
            assert str(small_disk / "checkpoint") in said
            assert "(on rank " in said
    assert first[0][0] is not None
    assert first[-1][0] is None, "so much room is enough: every place of the save was hit"
