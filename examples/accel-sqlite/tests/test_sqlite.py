"""`sqlite` is a tracker as accel-core understands it; what else it promises follows below."""

from __future__ import annotations

import json
import math
import sqlite3
from contextlib import closing

import pytest

from accel_core import Accelerator, TrackedRun
from accel_sqlite import SQLite
from accel_testing import Recorded, TrackerSuite, Written


def rows(directory, query):
    with closing(sqlite3.connect(directory / "run.sqlite")) as database:
        return database.execute(query).fetchall()


class TestSQLite(TrackerSuite):
    tracker = "sqlite"
    lacks = {
        "test_images_come_back": "it records numbers and texts only",
        "test_tables_come_back": "it records numbers and texts only",
        "test_histograms_come_back": "it records numbers and texts only",
    }

    def read(self, written: Written) -> Recorded:
        numbers, texts = {}, {}
        query = "SELECT step, name, value FROM records WHERE NOT superseded"
        for step, name, value in rows(written.run.directory, query):
            kind = texts if isinstance(value, str) else numbers
            kind.setdefault(name, []).append((step, math.nan if value is None else value))
        ((config, ended),) = rows(written.run.directory, "SELECT config, ended FROM run")
        return Recorded(numbers, texts, dict(leaves(json.loads(config))), ended=ended)


def leaves(config, prefix=""):
    for name, value in config.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{prefix}{name}/")
        else:
            yield prefix + name, value


def test_an_accelerator_records_with_it(tmp_path):
    accelerator = Accelerator(cpu=True, log_with="sqlite", project_dir=tmp_path)
    accelerator.init_trackers("digits", {"layers": 2}, init_kwargs={"sqlite": {"commit_every": 1}})
    for step in range(3):
        accelerator.log({"train": {"loss": 1 / (step + 1)}}, step)
    accelerator.end_training()
    (found,) = tmp_path.rglob("run.sqlite")
    assert rows(found.parent, "SELECT step, name, value FROM records") == [
        (step, "train/loss", 1 / (step + 1)) for step in range(3)
    ]
    assert rows(found.parent, "SELECT project, config, ended FROM run") == [("digits", '{"layers": 2}', "finished")]


def started(directory, tracker=None, **how):
    tracker = tracker or SQLite()
    tracker.start(TrackedRun("digits", "run", {}, directory, **how))
    return tracker


def test_what_is_superseded_stays_in_the_file(tmp_path):
    first = started(tmp_path)
    for step in range(3):
        first.log({"loss": float(step)}, step)
    first.finish(failed=True)
    second = started(tmp_path, resumed={}, step=2)
    second.log({"loss": 20.0}, 2)
    second.finish(failed=False)
    assert rows(tmp_path, "SELECT step, value, superseded FROM records") == [
        (0, 0.0, 0),
        (1, 1.0, 0),
        (2, 2.0, 1),
        (2, 20.0, 0),
    ]


def test_others_see_records_once_they_are_committed(tmp_path):
    tracker = started(tmp_path, SQLite(commit_every=2))
    seen = []
    for step in range(3):
        tracker.log({"loss": 0.5}, step)
        seen.append(len(rows(tmp_path, "SELECT * FROM records")))
    tracker.flush()
    assert [*seen, len(rows(tmp_path, "SELECT * FROM records"))] == [0, 2, 2, 3]
    tracker.finish(failed=False)


def test_integers_that_sqlite_cannot_hold_become_floats(tmp_path):
    tracker = started(tmp_path)
    tracker.log({"large": 2**63 - 1, "larger": 2**63}, 0)
    tracker.finish(failed=False)
    assert rows(tmp_path, "SELECT value FROM records") == [(2**63 - 1,), (2.0**63,)]


def test_a_new_run_does_not_go_into_the_file_of_another(tmp_path):
    started(tmp_path).finish(failed=False)
    with pytest.raises(FileExistsError, match=r"run\.sqlite, which exists\. Give it another folder"):
        started(tmp_path)


def test_options_are_checked():
    with pytest.raises(ValueError, match=r"SQLite\(commit_every=0\): expected at least 1"):
        SQLite(commit_every=0)
