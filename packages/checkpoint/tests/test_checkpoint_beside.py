"""Runs beside each other in one folder: who reads a checkpoint that is being replaced gets the new one."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import signal
import time
from functools import partial

import pytest
from checkpoint_jobs import Training, assert_clean, error_of

from accel_checkpoint.files.folder import Draft
from accel_checkpoint.files.lock import NAME, holder
from accel_checkpoint.files.manifest import identity, is_complete, unreplaced
from accel_checkpoint.files.retention import enforce
from accel_core import CheckpointError
from accel_testing import run_ranks


def load_what_is_replaced(folder):
    """Another run saves when manifest and index have been read, and the files have not."""
    reading, saving = Training(), Training()
    saving.accelerator.save_state(folder)

    def save(models, input_dir):
        if saving.counter.value < 2:
            saving.step()
            saving.accelerator.save_state(input_dir)

    reading.accelerator.register_load_state_pre_hook(save)
    reading.accelerator.load_state(folder)
    return reading.fingerprint() == saving.fingerprint(), reading.counter.value


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_load_whose_checkpoint_is_replaced_goes_on_with_the_new_one(tmp_path, ranks):
    assert run_ranks(load_what_is_replaced, ranks, tmp_path / "checkpoint") == [(True, 2)] * ranks


def save_beside_another(folder):
    """What a run hears that saves while another one does: before it, when that was killed, and when that has ended."""
    training = Training()
    reading, writing = os.pipe()
    other = os.fork()
    if other == 0:
        draft = Draft.begin(folder)
        (draft.data / "unpublished").write_text("x")
        os.write(writing, draft.id.encode())
        time.sleep(60)
        os._exit(0)
    data = folder / f"data-{os.read(reading, 16).decode()}"
    said = [error_of(partial(training.accelerator.save_state, folder, asynchronous=mode)) for mode in (False, "lazy")]
    said.append(error_of(lambda: enforce(folder.parent, 1, folder.parent / "checkpoint_9")))
    there = sorted(os.listdir(data))
    os.kill(other, signal.SIGKILL)
    os.waitpid(other, 0)
    training.accelerator.save_state(folder)
    return other, said, there, data.exists(), is_complete(folder)


def test_a_second_run_that_saves_into_one_folder_is_told_who_does_until_that_is_killed(tmp_path):
    ((pid, said, there, remains, complete),) = run_ranks(save_beside_another, 1, tmp_path / "checkpoint_1")
    for error in said[:2]:
        assert re.search(
            rf"^CheckpointError: .*another run is saving there: process {pid} on .*, since 20.*\. Save into another folder, or end",
            error or "SAVED",
        )
    assert said[2] is None
    assert there == ["saving.lock", "unpublished"]
    assert (remains, complete) == (False, True)


@pytest.mark.parametrize("content", ["", "no JSON", "[]", '{"host": "here"}', "x" * (1 << 13)])
def test_a_lock_that_says_nothing_is_another_process(tmp_path, content):
    reading, writing = os.pipe()
    other = os.fork()
    if other == 0:
        draft = Draft.begin(tmp_path)
        (draft.data / NAME).write_text(content)
        os.write(writing, draft.id.encode())
        time.sleep(60)
        os._exit(0)
    data = tmp_path / f"data-{os.read(reading, 16).decode()}"
    assert holder(data) == "another process"
    os.kill(other, signal.SIGKILL)
    os.waitpid(other, 0)
    assert holder(data) is None


def test_without_locks_of_files_a_save_goes_on(tmp_path, monkeypatch):
    def missing(descriptor, operation):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", missing)
    training = Training()
    draft = Draft.begin(tmp_path)
    training.accelerator.save_state(tmp_path)
    assert not draft.data.exists()
    assert_clean(tmp_path)


def test_reading_begins_anew_where_a_save_has_replaced_the_checkpoint_and_only_there(tmp_path):
    training = Training()
    training.accelerator.save_state(tmp_path)
    seen = []

    def read():
        seen.append(identity(tmp_path))
        if len(seen) < 3:
            training.accelerator.save_state(tmp_path)
            raise CheckpointError("gone")
        return "read"

    assert unreplaced(tmp_path, read) == "read"
    assert len(set(seen)) == 3

    def damaged():
        seen.append("once")
        raise CheckpointError("damaged")

    with pytest.raises(CheckpointError, match="damaged"):
        unreplaced(tmp_path, damaged)
    assert seen[3:] == ["once"]
