"""DVCLive: what was logged is in its files."""

from __future__ import annotations

import json
import logging
import subprocess
import threading
from pathlib import Path

import pytest
import torch
from read_dvclive import read_run
from services import needs, offline  # noqa: F401 - a fixture of every test in this module

from accel_core import Table, TrackedRun
from accel_core.testing import Recorded, TrackerSuite, Written
from accel_trackers.dvclive import DVCLive

pytestmark = [needs("dvclive")]


class TestDVCLive(TrackerSuite):
    tracker = DVCLive
    leaves_behind = {"warnings.filters": "modules that DVC imports, such as urllib3 and ruamel.yaml, add to them"}

    def options(self, folder):
        return {"dir": str(folder / "live")}

    def read(self, written: Written) -> Recorded:
        return read_run(written.folder / "live")


@pytest.fixture(autouse=True)
def directory(tmp_path, monkeypatch):
    """The working directory, from which DVCLive looks for a repository."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def recorded(*records, **options):
    tracker = DVCLive(**{"dir": Path("dvclive"), **options})
    tracker.start(TrackedRun("project", "run-1", {"lr": 0.1}))
    for step, values in records:
        tracker.log(values, step)
    tracker.finish(failed=False)
    return tracker


def summary(folder="dvclive"):
    return json.loads(Path(folder, "metrics.json").read_text(encoding="utf-8"))


def test_the_summary_has_the_latest_values_nested_by_name():
    recorded((0, {"train/loss": 2.0, "note": "a"}), (4, {"train/loss": 1.0}))
    assert summary() == {"train": {"loss": 1.0}, "note": "a", "step": 4}


@pytest.mark.parametrize("names", [("train", "train/loss"), ("train/loss", "train"), ("train/loss/sum", "train/loss")])
def test_names_that_a_nested_summary_has_no_room_for_are_kept(names):
    recorded(*((step, {name: float(index) for index, name in enumerate(names)}) for step in range(2)))
    found = read_run(Path("dvclive")).numbers
    assert found == {name: [(0, float(index)), (1, float(index))] for index, name in enumerate(names)}
    leaves = json.dumps(summary())
    assert "0.0" in leaves
    assert "1.0" in leaves


def test_a_value_named_step_has_its_own_column():
    recorded((3, {"step": 17.0, "inner/step": 18.0}))
    assert read_run(Path("dvclive")).numbers == {"step_": [(3, 17.0)], "inner/step_": [(3, 18.0)]}


@pytest.mark.parametrize("name", ["../../loss", "/loss", "./a/../loss", ".."])
def test_no_name_leads_out_of_the_folder(name, directory):
    recorded((0, {name: 1.0}), dir=directory / "inner" / "live")
    written = {path.relative_to(directory).parts[:2] for path in directory.rglob("*") if path.is_file()}
    assert written == {("inner", "live")}
    assert len(read_run(directory / "inner" / "live").numbers) == 1


@pytest.mark.parametrize("names", [("n" * 300, "n" * 299 + "m"), ("a\0b", "a_b"), ("in/" + "ü" * 200, "in/ü")])
def test_names_that_no_file_can_have_are_recorded_apart(names):
    recorded(*((step, {name: float(index) for index, name in enumerate(names)}) for step in range(2)))
    found = sorted(read_run(Path("dvclive")).numbers.values())
    assert found == [[(0, 0.0), (1, 0.0)], [(0, 1.0), (1, 1.0)]]


def test_a_table_without_columns_is_no_failure():
    tracker = DVCLive(dir=Path("dvclive"))
    tracker.start(TrackedRun("project", "run-1"))
    tracker.log_table("empty", Table((), ()), 0)
    tracker.log_table("full", Table(("a",), ((1,),)), 0)
    tracker.finish(failed=False)
    assert list(read_run(Path("dvclive")).tables) == ["full"]


def test_an_image_of_a_step_that_has_one_goes_to_a_further_folder():
    tracker = DVCLive(dir=Path("dvclive"))
    tracker.start(TrackedRun("project", "run-1"))
    first, second = torch.zeros(2, 2, 3, dtype=torch.uint8), torch.ones(2, 2, 3, dtype=torch.uint8)
    for image in (first, second):
        tracker.log_images({"drawn": [image]}, 5)
    tracker.finish(failed=False)
    found = read_run(Path("dvclive")).images
    assert torch.equal(found["drawn"][0][1], first)
    assert torch.equal(found["drawn (2)"][0][1], second)


def test_a_resumed_run_that_is_not_there_is_missed(caplog, directory):
    state = recorded((0, {"loss": 1.0})).state()
    for folder, warns in (("dvclive", False), ("elsewhere", True)):
        tracker = DVCLive(dir=Path(folder))
        with caplog.at_level(logging.WARNING):
            tracker.start(TrackedRun("project", "run-1", resumed=state, step=1))
        tracker.finish(failed=False)
        assert ("to go on with the run of a checkpoint in elsewhere, where there is none" in caplog.text) is warns


def test_no_thread_is_left():
    recorded((0, {"loss": 1.0}))
    assert threading.active_count() == 1


def test_a_plot_of_dvc_is_made_on_request_alone(directory):
    recorded((0, {"loss": 1.0}))
    assert not (directory / "dvc.yaml").exists()
    recorded((0, {"loss": 1.0}), dvcyaml=Path("dvc.yaml"))
    assert "dvclive/metrics.json" in (directory / "dvc.yaml").read_text(encoding="utf-8")


def test_a_file_under_another_name_than_that_of_dvc_is_refused():
    with pytest.raises(
        ValueError, match=r"dvcyaml='here/plots.yaml'\) is to be a file named dvc.yaml.*'here/dvc.yaml'"
    ):
        DVCLive(dvcyaml=Path("here/plots.yaml"))


def test_in_a_git_repository_dvclive_makes_one_of_dvc_and_no_experiment(directory):
    """What the docstring warns of: should it fail, the warning can go."""
    for command in (
        ["init", "-q"],
        ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-q", "--allow-empty", "-m", "a"],
    ):
        subprocess.run(["git", *command], check=True, timeout=60)
    recorded((0, {"loss": 1.0}))
    assert (directory / ".dvc").is_dir()
    refs = subprocess.run(["git", "for-each-ref"], check=True, capture_output=True, text=True, timeout=60).stdout
    assert "refs/exps" not in refs


def test_without_a_folder_of_its_own_it_writes_to_that_of_the_run(directory):
    tracker = DVCLive()
    assert tracker.requires_logging_directory
    assert not DVCLive(dir=Path("dvclive")).requires_logging_directory
    tracker.start(TrackedRun("project", "run-1", directory=directory / "runs" / "project" / "run-1"))
    tracker.log({"loss": 0.5}, 0)
    tracker.finish(failed=False)
    assert (directory / "runs/project/run-1/metrics.json").exists()
    assert not (directory / "dvclive").exists()
