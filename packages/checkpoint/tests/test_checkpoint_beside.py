"""Runs beside each other in one folder: who saves where another one is saving is told."""

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
from accel_checkpoint.files.manifest import is_complete
from accel_checkpoint.files.retention import enforce
from accel_testing import run_ranks


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
