"""Trackers that write files: while the disk is full, records wait, and readers find all of them in the end."""

from __future__ import annotations

import errno
import io
import json

import pytest
import torch
from pngs import decoded
from read_tensorboard import read_events
from services import needs

from accel_core import Accelerator
from accel_trackers.jsonl import read
from accel_trackers.waiting_file import WaitingFile


class Small(io.FileIO):
    """A file on a disk which at first has space for 20 bytes, and after two attempts for all."""

    space, attempts = 20, 0

    def write(self, content):
        if not self.space and self.attempts < 2:
            self.attempts += 1
            raise OSError(errno.ENOSPC, "No space left on device")
        content = content[: self.space] if self.space else content
        self.space = 0
        return super().write(content)


class WaitingSmall(WaitingFile, Small):
    """Waits for the small disk."""


@pytest.fixture
def record(tmp_path, monkeypatch):
    """Records five numbers and an image on a small disk, and returns the folder."""

    def record(tracker):
        monkeypatch.setattr("accel_trackers.waiting_file._TRY_AGAIN_AFTER", 0.01)
        monkeypatch.setattr(f"accel_trackers.{tracker}.WaitingFile", WaitingSmall)
        accelerator = Accelerator(cpu=True, log_with=tracker, project_dir=tmp_path)
        accelerator.init_trackers("project")
        for step in range(5):
            accelerator.log({"loss": step / 2}, step=step)
        accelerator.log_images({"seen": torch.zeros(1, 20, 20, dtype=torch.uint8)}, step=5)
        accelerator.end_training()
        (folder,) = (tmp_path / "project").iterdir()
        return folder

    return record


def waits(caplog):
    told = [each.message for each in caplog.records if each.name == "accel_trackers.waiting_file"]
    assert {message.split(": ", 1)[1] for message in told} <= {
        "No space left on device. Records wait until there is space; make room for them."
    }
    return len(told)


def test_lines_wait_while_the_disk_is_full_and_none_is_lost(record, caplog):
    *records, shown = read(record("jsonl"))
    assert [record["values"]["loss"] for record in records] == [0.0, 0.5, 1.0, 1.5, 2.0]
    assert decoded(shown["images"]["seen"][0].read_bytes()).shape == (20, 20, 1)
    assert waits(caplog) == 2  # for the lines and for the image: once for each time that the disk was full


@needs("tensorboard")
def test_events_wait_while_the_disk_is_full_and_none_is_lost(record, caplog):
    found = read_events(record("tensorboard"))
    assert found.numbers == {"loss": [(step, step / 2) for step in range(5)]}
    assert [(step, image.shape) for step, image in found.images["seen"]] == [(5, (20, 20, 1))]
    assert waits(caplog) == 1


@needs("dvclive")
def test_rows_of_dvclive_wait_while_the_disk_is_full_and_are_whole(tmp_path, monkeypatch, caplog):
    from dvclive import Live
    from dvclive.plots.metric import Metric

    monkeypatch.setattr("accel_trackers.waiting_file._TRY_AGAIN_AFTER", 0.01)
    monkeypatch.chdir(tmp_path)  # from which DVCLive looks for a repository
    dump, make_summary, failures = Metric.dump, Live.make_summary, {0: 2, 3: 1, "summary": 1}

    def full(what):
        failures[what] = failures.get(what, 0) - 1
        return failures[what] >= 0

    def dump_in_part(metric, value, **options):
        if full(metric.step):
            metric.output_path.write_text((metric.output_path.read_text() if metric.step else "") + "3\t1.")
            raise OSError(errno.ENOSPC, "No space left on device")
        dump(metric, value, **options)

    def summarize(live):
        if full("summary"):
            raise OSError(errno.ENOSPC, "No space left on device")
        make_summary(live)

    monkeypatch.setattr(Metric, "dump", dump_in_part)
    monkeypatch.setattr(Live, "make_summary", summarize)
    accelerator = Accelerator(cpu=True, log_with="dvclive", project_dir=tmp_path)
    accelerator.init_trackers("project")
    for step in range(5):
        accelerator.log({"loss": step / 2}, step=step)
    accelerator.end_training()
    (file,) = tmp_path.rglob("loss.tsv")
    assert file.read_text().splitlines() == ["step\tloss", "0\t0.0", "1\t0.5", "2\t1.0", "3\t1.5", "4\t2.0"]
    assert json.loads((file.parents[2] / "metrics.json").read_text()) == {"loss": 2.0, "step": 4}
    assert waits(caplog) == 3  # for two rows and the summary


def test_other_errors_of_the_disk_are_raised(tmp_path):
    (tmp_path / "read").touch()
    with WaitingFile(tmp_path / "read", "rb") as file, pytest.raises(OSError, match="not open for writing"):
        file.write(b"bytes")
