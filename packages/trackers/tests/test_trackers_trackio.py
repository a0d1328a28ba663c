"""Trackio: what was logged stands in its database on this machine, the Hub is left alone, and so is the process."""

from __future__ import annotations

import os
import sqlite3
import sys
import threading
from pathlib import Path

import pytest
from read_trackio import configuration, recorded, rows, runs
from services import Offline, needs, offline, record  # noqa: F401 - a fixture of every test in this module

from accel_core import Table, TrackedRun
from accel_core.api.component import how_to_install
from accel_testing import TrackerSuite
from accel_trackers.trackio import Trackio

pytestmark = needs("trackio")


@pytest.fixture(scope="module")
def databases(tmp_path_factory):
    """One folder for the whole program: Trackio decides when it is imported, perhaps by a test of another module."""
    if "trackio" in sys.modules:
        return Path(sys.modules["trackio"].utils.TRACKIO_DIR)
    return tmp_path_factory.mktemp("databases")


@pytest.fixture(autouse=True)
def in_databases(offline, databases):  # noqa: F811
    os.environ["TRACKIO_DIR"] = str(databases)
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"


@pytest.fixture
def project(request):
    return request.node.name.replace("[", "-").replace("]", "")[:60]


class TestTrackio(TrackerSuite):
    tracker = "trackio"
    lacks = {"test_tables_come_back": "Trackio keeps the names of columns in the rows: a table without rows has none"}

    def read(self, written):
        return recorded(written.run.project, written.state["name"])


def test_tables_with_rows_come_back(project):
    table = Table(("input", "score"), (("a", 0.5), (None, True), ('ü, "so"\n|', -3)))
    record(Trackio(), TrackedRun(project, "run-1"), lambda tracker: tracker.log_table("answers", table, 4))
    assert recorded(project, "run-1").tables == {"answers": [(4, table)]}


def test_a_run_is_known_by_its_name_group_and_configuration(project):
    run = TrackedRun(project, "run-1", {"lr": 0.1, "nested": {"a": [1, None]}})
    tracker = Trackio(name="a name", group="a group")
    record(tracker, run, lambda tracker: tracker.log({"a": 1}, 0))
    assert runs(project) == ["a name"]
    assert configuration(project, "a name") == run.config
    assert tracker.tracker.config["_Group"] == "a group"
    assert tracker.state() == {"name": "a name"}


def test_names_that_are_trackios_own_in_the_configuration_are_told(project, caplog):
    config = {"_target_": "package.Class", "target": 1, "": 2, "model": {"_target_": "package.Model"}}
    record(Trackio(), TrackedRun(project, "run-1", config), lambda tracker: tracker.log({"a": 1}, 0))
    found = configuration(project, "run-1")
    [renamed] = found.keys() - config.keys()
    assert found == {renamed if name == "_target_" else name: value for name, value in config.items()}
    assert f"Trackio takes no name like '_target_': it is recorded as {renamed!r}." in caplog.text


def test_a_project_whose_name_is_too_long_for_a_file_has_another_which_is_told(caplog):
    long = "ü" * 300
    tracker = Trackio()
    record(tracker, TrackedRun(long, "run-1"), lambda tracker: tracker.log({"a": 1}, 0))
    assert rows(tracker.tracker.project, "run-1") == [(0, {"a": 1})]
    assert f"Trackio takes no name like {long!r}: it is recorded as {tracker.tracker.project!r}." in caplog.text


def test_options_of_the_call_go_on_top(project):
    run = TrackedRun(project, "run-1", options={"name": "of the call"})
    record(Trackio(name="of the tracker"), run, lambda tracker: tracker.log({"a": 1}, 3))
    assert rows(project, "of the call") == [(3, {"a": 1})]


def test_resuming_a_run_that_is_not_there_fails(project):
    with pytest.raises(ValueError, match="Run 'gone' does not exist"):
        record(Trackio(), TrackedRun(project, "run-1", resumed={"name": "gone"}))


def test_what_trackio_could_not_write_is_told(project, monkeypatch):
    from trackio.sqlite_storage import SQLiteStorage

    def fail(*_, **__):
        raise OSError("the disk is full")

    def work(tracker):
        tracker.log({"a": 1}, 0)
        tracker.flush()
        monkeypatch.setattr(SQLiteStorage, "bulk_log", fail)
        tracker.log({"a": 2}, 1)

    with (
        pytest.warns(UserWarning, match="the disk is full"),
        pytest.raises(RuntimeError, match="of 2 records 1 are in Trackio's database"),
    ):
        record(Trackio(), TrackedRun(project, "run-1"), work)


def test_the_hub_is_not_asked_even_with_a_token(project, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", "hf_none")
    record(Trackio(), TrackedRun(project, "run-1"), lambda tracker: tracker.log({"a": 1}, 0))
    assert constants.HF_HUB_OFFLINE is False
    assert rows(project, "run-1") == [(0, {"a": 1})]


def test_the_hub_is_asked_for_a_space(project, offline, monkeypatch):  # noqa: F811
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", "hf_none")
    offline.tolerated.append("huggingface.co")
    with pytest.raises(Exception, match="."):
        record(Trackio(space_id="someone/space"), TrackedRun(project, "run-1"))
    assert "huggingface.co" in offline.attempts


def test_types_of_trackio_are_recorded_as_they_are(project):
    import trackio

    text = trackio.Markdown("**so**")
    assert Trackio().records(text)
    assert not Trackio().records("so")
    record(Trackio(), TrackedRun(project, "run-1"), lambda tracker: tracker.log({"text": text}, 2))
    [(step, stored)] = rows(project, "run-1")
    assert (step, stored["text"]["_value"]) == (2, "**so**")


def test_two_runs_in_one_thread_do_not_end_each_other(project):
    def work(first):
        second = Trackio()
        second.start(TrackedRun(project, "second"))
        assert len([thread for thread in threading.enumerate() if "batch_sender" in thread.name]) == 2
        first.log({"a": 1}, 0)
        second.log({"a": 2}, 0)
        second.finish(False)

    record(Trackio(), TrackedRun(project, "first"), work)
    assert (rows(project, "first"), rows(project, "second")) == ([(0, {"a": 1})], [(0, {"a": 2})])


def test_another_folder_than_the_one_trackio_has_is_refused(project, tmp_path, databases):
    record(Trackio(dir=databases), TrackedRun(project, "run-1"))
    with pytest.raises(ValueError, match=rf"dir='{tmp_path}'.*one folder, here '{databases}'.*Set TRACKIO_DIR in"):
        record(Trackio(dir=tmp_path), TrackedRun(project, "run-1"))
    assert os.environ["TRACKIO_DIR"] == str(databases)


def test_what_others_print_while_a_run_begins_is_printed(project, capfd, monkeypatch):
    import trackio

    begin = trackio.init

    def init(**options):
        print("of the program")
        return begin(**options)

    monkeypatch.setattr(trackio, "init", init)
    record(Trackio(), TrackedRun(project, "run-1"))
    assert capfd.readouterr() == ("of the program\n", "")


def test_the_process_stays_as_it_was(project, capfd):
    before = (sys.stdout, sys.stderr, dict(os.environ))

    def work(tracker):
        print("of the program")
        tracker.log({"a": 1}, 0)
        assert len([thread for thread in threading.enumerate() if "batch_sender" in thread.name]) == 1

    record(Trackio(), TrackedRun(project, "run-1"), work)
    assert (sys.stdout, sys.stderr, dict(os.environ)) == before
    assert capfd.readouterr() == ("of the program\n", "")
    assert "print" not in vars(sys.modules["trackio.run"])


def test_it_is_usable_exactly_where_trackio_is_installed(monkeypatch):
    assert Trackio.unusable() is None
    monkeypatch.setattr("accel_trackers.service.find_spec", lambda name: None)
    assert Trackio.unusable() == f"trackio is not installed. {how_to_install('accel-trackers[trackio]')}"


def test_a_database_that_cannot_be_read_for_a_moment_does_not_end_the_recording(project, monkeypatch):
    """On a full disk Trackio warns, drops what it could not write, and goes on; so does the tracker, which waits for that once."""
    from trackio.sqlite_storage import SQLiteStorage

    answers: list[int | Exception] = [0, sqlite3.OperationalError("disk I/O error")]

    def count(*_: object, **__: object) -> int:
        answer = answers.pop() if len(answers) > 1 else answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    tracker = Trackio()
    tracker.start(TrackedRun(project, "run-1", {}))
    tracker.log({"loss": 1.0}, 0)
    with monkeypatch.context() as patched:
        patched.setattr(SQLiteStorage, "get_log_count", count)
        tracker.flush()
        patched.setattr("accel_trackers.trackio.PATIENCE", 0.1)
        tracker.flush()
        patched.setattr("accel_trackers.trackio.PATIENCE", 1000)
        tracker.flush()
    tracker.finish(failed=False)


def test_records_that_come_late_are_not_taken_for_dropped(project, monkeypatch):
    from trackio.sqlite_storage import SQLiteStorage

    answers = [0]
    tracker = Trackio()
    tracker.start(TrackedRun(project, "run-1", {}))
    tracker.log({"loss": 1.0}, 0)
    with monkeypatch.context() as patched:
        patched.setattr(SQLiteStorage, "get_log_count", lambda *_, **__: answers.pop(0) if answers[1:] else answers[0])
        patched.setattr("accel_trackers.trackio.PATIENCE", 0.1)
        tracker.flush()
        patched.setattr("accel_trackers.trackio.PATIENCE", 1000)
        answers[:] = [1]
        tracker.flush()
        tracker.log({"loss": 2.0}, 1)
        answers[:] = [1, 1, 2]
        tracker.flush()
        assert answers == [2], "it has waited for the second record"
    tracker.finish(failed=False)
