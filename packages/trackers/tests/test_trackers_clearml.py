"""ClearML: what was logged is in the session that it keeps offline."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from read_clearml import events, read_run
from services import needs, offline  # noqa: F401 - a fixture of every test in this module

from accel_core import Bins, TrackedRun
from accel_testing import Recorded, TrackerSuite, Written
from accel_trackers.clearml import ClearML

pytestmark = [
    needs("clearml"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of pyparsing, when ClearML reads its configuration
    pytest.mark.usefixtures("sessions"),
]


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """One folder for all tests: ClearML reads the variable once."""
    return tmp_path_factory.mktemp("sessions")


@pytest.fixture
def sessions(offline, kept):  # noqa: F811
    os.environ["CLEARML_CACHE_DIR"] = str(kept)
    return kept / "offline"


class TestClearML(TrackerSuite):
    tracker = staticmethod(lambda: ClearML(offline=True))
    lacks = {
        "test_two_runs_do_not_mix": "ClearML has one task per process",
        "test_nothing_is_printed": "ClearML prints which task it made, and has no switch for it",
        "test_numbers_that_are_not_finite_come_back": "they are lines of the log, for ClearML's numbers are finite",
    }
    leaves_behind = {
        "warnings.filters": "modules that ClearML imports, such as urllib3, add to them",
        "os.environ['CLEARML_": "ClearML tells its subprocesses of the task",
        "os.environ['TRAINS_": "the same under an older name",
        "the start method of multiprocessing": "a pool of threads, with which ClearML sends records, settles it",
    }

    def read(self, written: Written) -> Recorded:
        sessions = Path(os.environ["CLEARML_CACHE_DIR"], "offline")
        return read_run(sessions, written.state["task_id"], is_open=written.is_open)


@pytest.fixture
def started():
    tracker = ClearML(task_name="the third", tags=["long"], offline=True)
    tracker.start(TrackedRun("project", "run-1", {"lr": 0.1, "betas": [0.9, None]}))
    yield tracker
    if tracker.tracker.is_main_task():
        tracker.finish(failed=False)


def test_options_and_configuration_are_those_of_the_task(started):
    task = started.tracker
    assert (task.name, task.get_tags()) == ("the third", ["long"])
    assert task.get_parameters() == {"General/lr": "0.1", "General/betas": "[0.9, null]"}


def test_a_number_that_is_not_finite_is_a_line_of_the_log(started, sessions):
    started.log({"norm": float("nan"), "loss": 1.5, "top": float("-inf")}, 7)
    started.finish(failed=False)
    session = sessions / started.tracker.id
    assert read_run(sessions, started.tracker.id, is_open=False).numbers == {"loss": [(7, 1.5)]}
    log = (session / "log.jsonl").read_text(encoding="utf-8")
    assert "norm at step 7: nan" in log
    assert "top at step 7: -inf" in log


def test_no_image_is_overwritten(started, sessions):
    images = [torch.full((2, 2, 1), number, dtype=torch.uint8) for number in range(120)]
    for step, image in enumerate(images):
        started.log_images({"drawn": [image]}, step)
    started.log_images({"drawn": [images[5]]}, 3)
    started.finish(failed=False)
    found = read_run(sessions, started.tracker.id, is_open=False).images
    assert sorted(step for step, _ in found["drawn"]) == list(range(120))
    assert all(torch.equal(image, images[step]) for step, image in found["drawn"])
    assert torch.equal(found["drawn/drawn ⟨2⟩"][0][1], images[5])


def test_no_name_takes_the_place_of_a_further_series_or_image(started, sessions):
    shades = [torch.full((2, 2, 1), number, dtype=torch.uint8) for number in range(8)]
    started.log_images(
        {"drawn": shades[:2], "drawn ⟨2⟩": [shades[2]], "drawn ⟨image 1⟩": [shades[3]], "": [shades[4]]}, 0
    )
    started.log_images({"drawn": [shades[5]], "drawn 1": [shades[6]], "drawn (2)": [shades[7]]}, 0)
    started.finish(failed=False)
    found = read_run(sessions, started.tracker.id, is_open=False).images
    assert sorted(int(image[0, 0, 0]) for images in found.values() for _, image in images) == list(range(8))
    assert {"drawn", "drawn 1", "drawn (2)", "drawn/drawn ⟨2⟩"} < set(found)


def test_options_of_a_record_go_where_they_are_known(started, sessions):
    options = {"level": logging.WARNING, "xaxis": "weight", "extra_layout": {"title": {"text": "of the first layer"}}}
    started.log({"loss": 1.0, "note": "so"}, 0, **options)
    started.log_histograms({"weights": Bins((1, 2), (0.0, 1.0, 2.0), 0.0, 0.0)}, 0, **options)
    with pytest.raises(TypeError, match=r"'walltime', which report_text or report_histogram does not have here.*xaxis"):
        started.log({"loss": 1.0}, 0, walltime=1)
    started.finish(failed=False)
    session = sessions / started.tracker.id
    assert read_run(sessions, started.tracker.id, is_open=False).numbers == {"loss": [(0, 1.0)]}
    lines = events((session / "log.jsonl").read_text(encoding="utf-8"))
    assert [line["level"] for line in lines if line["msg"].startswith("note at")] == ["warning"]
    assert "of the first layer" in (session / "metrics.jsonl").read_text(encoding="utf-8")


FRAMEWORKS = """
import builtins, sys
from accel_core import TrackedRun
from accel_trackers.clearml import _FRAMEWORKS, ClearML
before, tracker = builtins.__import__, ClearML(offline=True)
options = {"auto_connect_frameworks": {**dict.fromkeys(_FRAMEWORKS, False), "xgboost": True}} if sys.argv[1:] else {}
tracker.start(TrackedRun("project", "run-1", options=options))
print("patched:", builtins.__import__ is not before)
tracker.finish(failed=False)
print("patched:", builtins.__import__ is not before)
"""


@pytest.mark.parametrize("wanted", [False, True])
def test_imports_stay_patched_where_frameworks_are_asked_for_and_are_not_else(wanted):
    """In a process of its own: ClearML patches once."""
    command = [sys.executable, "-c", FRAMEWORKS, *["yes"] * wanted]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.count(f"patched: {wanted}") == 2


def test_a_graph_is_the_first_part_of_a_name():
    from accel_trackers.clearml import _title_and_series

    names = ["loss", "train/loss", "train/loss/sum", "loss/loss", "/loss", "loss/"]
    assert [_title_and_series(name) for name in names] == [
        ("loss", "loss"), ("train", "loss"), ("train", "loss/sum"), ("loss/loss", "loss/loss"), ("/loss", "/loss"), ("loss/", "loss/"),
    ]  # fmt: skip


def test_a_second_run_at_once_is_refused(started):
    with pytest.raises(RuntimeError, match="one task per process: end the run 'run-1' before"):
        ClearML(offline=True).start(TrackedRun("project", "run-2"))


def test_the_task_of_the_program_is_used_and_not_ended(sessions, caplog):
    import clearml

    clearml.Task.set_offline(offline_mode=True)
    clearml.Task.set_random_seed(None)
    hooks = sys.excepthook, sys.exit
    task = clearml.Task.init(
        "project",
        "their own",
        auto_connect_frameworks={"detect_repository": False, "pytorch": False},
        auto_resource_monitoring=False,
    )
    sys.excepthook, sys.exit = hooks
    tracker = ClearML()
    with caplog.at_level(logging.WARNING):
        tracker.start(TrackedRun("project", "run-1", options={"task_name": "mine"}))
    assert "own task of ClearML is used, and these init_kwargs are not: ['task_name']" in caplog.text
    assert tracker.tracker is task
    tracker.log({"loss": 1.0}, 0)
    tracker.finish(failed=True)
    assert clearml.Task.current_task() is task
    task.close()
    assert read_run(sessions, task.id, is_open=False).numbers == {"loss": [(0, 1.0)]}


def test_the_process_is_not_forked_and_threads_end(started):
    children = Path(f"/proc/self/task/{threading.get_native_id()}/children")
    started.log({"loss": 1.0}, 0)
    started.flush()
    assert not children.exists() or children.read_text() == ""
    assert threading.active_count() > 1
    started.finish(failed=True)
    assert threading.active_count() == 1
