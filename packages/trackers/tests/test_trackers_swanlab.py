"""SwanLab: what was logged is in the files that it writes offline."""

from __future__ import annotations

import gc
import logging
import math
import warnings

import pytest
from read_swanlab import read_run, records
from services import needs, offline  # noqa: F401 - a fixture of every test in this module

from accel_core import RecordRefusedError, TrackedRun
from accel_testing import Recorded, TrackerSuite, Written
from accel_trackers.swanlab import SwanLab

pytestmark = [needs("swanlab")]


class TestSwanLab(TrackerSuite):
    tracker = SwanLab
    lacks = {
        "test_two_runs_do_not_mix": "SwanLab has one run per process",
        "test_a_resumed_run_goes_on": "offline, SwanLab begins another folder, which `swanlab sync --id` joins to the first",
        "test_what_was_flushed_can_be_read": "SwanLab writes through a buffer, and has no way to flush it",
        "test_nothing_is_printed": "SwanLab prints where the run is, and has no switch for it",
    }
    leaves_behind = {"warnings.filters": "modules that SwanLab imports, such as urllib3, add to them"}

    def options(self, folder):
        return {"mode": "offline", "log_dir": str(folder)}

    def read(self, written: Written) -> Recorded:
        return read_run(written.folder, written.state["id"])


@pytest.fixture
def started(tmp_path):
    tracker = SwanLab(mode="offline", name="the third", tags=["long"], log_dir=tmp_path)
    tracker.start(TrackedRun("project", "run-1", {"lr": None}))
    yield tracker
    if tracker.tracker.alive:
        tracker.finish(failed=False)


def test_options_become_properties_of_the_run(started):
    assert (started.tracker.id, started.tracker.name, started.tracker.mode) == ("run-1", "the third", "offline")


def test_numbers_beyond_all_others_keep_their_sign_in_the_configuration(tmp_path):
    tracker = SwanLab(mode="offline", log_dir=tmp_path)
    low, high = -math.inf, math.inf
    tracker.start(TrackedRun("project", "run-2", {"low": low, "high": high, "both": [low, high], "in": {"low": low}}))
    tracker.finish(failed=False)
    config = read_run(tmp_path, "run-2").config
    assert config == {"low": "-Inf", "high": "Inf", "both": ["-Inf", "Inf"], "in/low": "-Inf"}


def test_a_name_may_have_values_of_several_kinds(started, tmp_path):
    import swanlab

    started.log({"state": 1.0}, 0)
    started.log({"state": "warm"}, 1)
    started.log({"said": swanlab.Text("so")}, 2)
    started.finish(failed=False)
    found = read_run(tmp_path, "run-1")
    assert found.numbers == {"state": [(0, 1.0)]}
    assert found.texts == {"state ⟨text⟩": [(1, "warm")], "said": [(2, "so")]}


def test_every_name_and_step_is_recorded_or_refused(started, tmp_path, caplog):
    names = ["lr", " lr", "lr/", "a\tb", ".", "..", "", "gen", "gen (2)", "gen ⟨2⟩", "x" * 600, "x" * 599 + "y"]
    started.log({name: float(index) for index, name in enumerate(names)}, 0)
    started.log({"gen": 100.0}, 0)
    with pytest.raises(RecordRefusedError, match=rf"at step {2**48 + 1}, and SwanLab has none beyond"):
        started.log({"far": 1.0}, 2**48 + 1)
    started.log({"far": 2.0}, 2**48)
    started.finish(failed=False)
    found = read_run(tmp_path, "run-1").numbers
    assert sorted(value for records in found.values() for step, value in records if step == 0) == [
        *map(float, range(len(names))),
        100.0,
    ]
    assert {"lr", "gen", "gen (2)"} < set(found)
    assert found["far"] == [(2**48, 2.0)]
    assert "SwanLab takes no name like ' lr': it is recorded as 'lr_" in caplog.text
    assert caplog.text.count("SwanLab takes no name like") == len(names) - 3


@pytest.mark.parametrize("project", ["p" * 300, "größe and more"])
def test_a_project_whose_name_swanlab_does_not_take_has_another_which_is_told(project, tmp_path, caplog):
    tracker = SwanLab(mode="offline", log_dir=tmp_path)
    tracker.start(TrackedRun(project, "run-1"))
    tracker.log({"loss": 1.0}, 0)
    tracker.finish(failed=False)
    assert read_run(tmp_path, "run-1").numbers == {"loss": [(0, 1.0)]}
    assert f"SwanLab takes no name like {project!r}: it is recorded as" in caplog.text


def test_objects_of_swanlab_are_recorded_as_they_are():
    import swanlab

    assert SwanLab().records(swanlab.Text("so"))
    assert not SwanLab().records(object())


def test_a_second_run_at_once_is_refused(started, tmp_path):
    with pytest.raises(RuntimeError, match=r"one run per process: end 'run-1' before, as by swanlab.finish\(\)"):
        SwanLab(mode="offline", log_dir=tmp_path).start(TrackedRun("project", "run-2"))


def test_nobody_is_asked_for_a_key():
    with pytest.raises(RuntimeError, match="no API key"):
        SwanLab(mode="online").start(TrackedRun("project", "run-1"))


def test_an_option_that_swanlab_would_ignore_is_refused():
    with pytest.raises(TypeError, match=r"'nmae', which swanlab.init does not have here: expected .*name"):
        SwanLab(mode="offline").start(TrackedRun("project", "run-1", options={"nmae": "x", "notes": "y"}))


def test_what_swanlab_finds_out_is_off_and_can_be_turned_on(tmp_path):
    import swanlab

    for turned_on in (False, True):
        settings = {"settings": swanlab.Settings(probe={"runtime": True})} if turned_on else {}
        tracker = SwanLab(mode="offline", log_dir=tmp_path / str(turned_on))
        tracker.start(TrackedRun("project", "run-1", options=settings))
        tracker.finish(failed=False)
        (found,) = (tmp_path / str(turned_on)).rglob("swanlab-metadata.json")
        assert ("python" in found.read_text(encoding="utf-8")) is turned_on


def test_a_resumed_run_says_that_it_is_in_a_folder_of_its_own(tmp_path, caplog):
    options = {"mode": "offline", "log_dir": str(tmp_path)}
    first = SwanLab()
    first.start(TrackedRun("project", "run-1", options=options))
    first.log({"loss": 1.0}, 4)
    state = first.state()
    first.finish(failed=False)
    second = SwanLab()
    with caplog.at_level(logging.WARNING):
        second.start(TrackedRun("project", "run-2", options=options, resumed=state, step=5))
    second.log({"loss": 2.0}, 4)
    second.finish(failed=False)
    assert "SwanLab does not go on in a run that is not online: from step 5 on it is recorded in" in caplog.text
    assert "swanlab sync --id" in caplog.text
    found = read_run(tmp_path, "run-1")
    assert (found.numbers["loss"], found.runs) == ([(4, 1.0), (4, 2.0)], 2)


def test_disabled_it_records_nothing(tmp_path):
    tracker = SwanLab(mode="disabled", log_dir=tmp_path)
    tracker.start(TrackedRun("project", "run-1"))
    tracker.log({"loss": 1.0}, 0)
    tracker.finish(failed=False)
    assert not list(tmp_path.rglob("*.swanlab"))


def test_the_reader_of_these_tests_closes_a_file_that_is_not_complete(tmp_path):
    (tmp_path / "run-1.swanlab").write_bytes(b"abc")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with pytest.raises(AssertionError, match="header is 3 bytes") as refused:
            next(records(tmp_path))
        del refused
        gc.collect()
    assert [str(each.message) for each in told if each.category is ResourceWarning] == []
