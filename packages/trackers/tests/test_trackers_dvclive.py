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

from accel_core import Bins, Table, TrackedRun
from accel_testing import Recorded, TrackerSuite, Written
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
    found = read_run(Path("dvclive")).numbers
    assert found == {"step__43b9fe3c": [(3, 17.0)], "inner/step__21b0f90e": [(3, 18.0)]}


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


def test_names_that_lead_to_one_file_are_recorded_apart(caplog):
    names = ["a/b", "a//b", "/a/b", "./a/b", "", ".", "_", "step", "step_"]
    recorded(*((step, {name: float(index) for index, name in enumerate(names)}) for step in range(2)))
    found = read_run(Path("dvclive")).numbers
    assert sorted(found.values()) == [[(0, float(index)), (1, float(index))] for index in range(len(names))]
    assert {"a/b", "_", "step_"} < set(found)
    assert "DVCLive takes no name like 'a//b': it is recorded as 'a/b_" in caplog.text


def test_no_name_takes_the_place_of_a_further_series_or_image():
    tracker = DVCLive(dir=Path("dvclive"))
    tracker.start(TrackedRun("project", "run-1"))
    shades = [torch.full((2, 2, 1), number, dtype=torch.uint8) for number in range(6)]
    tracker.log_images({"drawn": shades[:2], "drawn/1": [shades[2]], "drawn ⟨2⟩": [shades[3]]}, 0)
    tracker.log_images({"drawn": [shades[4]], "drawn (2)": [shades[5]]}, 0)
    tracker.finish(failed=False)
    found = read_run(Path("dvclive")).images
    assert sorted(int(image[0, 0, 0]) for images in found.values() for _, image in images) == list(range(6))


def test_options_of_a_record_go_where_they_are_known():
    tracker = DVCLive(dir=Path("dvclive"), dvcyaml=Path("dvc.yaml"))
    tracker.start(TrackedRun("project", "run-1"))
    options = {"timestamp": True, "title": "of the first layer"}
    tracker.log({"loss": 1.0}, 0, **options)
    tracker.log_histograms({"weights": Bins((1, 2), (0.0, 1.0, 2.0), 0.0, 0.0)}, 0, **options)
    with pytest.raises(
        TypeError, match=r"'walltime', which log_metric or log_plot does not have here.*timestamp, title"
    ):
        tracker.log({"loss": 1.0}, 0, walltime=1)
    tracker.finish(failed=False)
    assert "timestamp" in Path("dvclive/plots/metrics/loss.tsv").read_text(encoding="utf-8")
    assert "of the first layer" in Path("dvc.yaml").read_text(encoding="utf-8")


def test_messages_of_asyncio_are_shown_as_before():
    assert logging.getLogger("asyncio").level == logging.NOTSET
    recorded((0, {"loss": 1.0}))
    assert logging.getLogger("asyncio").level == logging.NOTSET


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
    assert torch.equal(found["drawn ⟨2⟩"][0][1], second)


def test_a_resumed_run_that_is_not_there_is_missed(caplog, directory):
    state = recorded((0, {"loss": 1.0})).state()
    for folder, warns in (("dvclive", False), ("elsewhere", True)):
        tracker = DVCLive(dir=Path(folder))
        with caplog.at_level(logging.WARNING):
            tracker.start(TrackedRun("project", "run-1", resumed=state, step=1))
        tracker.finish(failed=False)
        assert ("goes on in elsewhere, where no run is: what came before is missing" in caplog.text) is warns


def test_no_thread_is_left():
    recorded((0, {"loss": 1.0}))
    assert threading.active_count() == 1


def test_a_plot_of_dvc_is_made_on_request_alone(directory):
    recorded((0, {"loss": 1.0}))
    assert not (directory / "dvc.yaml").exists()
    recorded((0, {"loss": 1.0}), dvcyaml=Path("dvc.yaml"))
    assert "dvclive/metrics.json" in (directory / "dvc.yaml").read_text(encoding="utf-8")


def git(*arguments):
    """What git says."""
    return subprocess.run(["git", *arguments], check=True, capture_output=True, text=True, timeout=60).stdout


def repository(commits, dvc=False):
    """A git repository in the working directory, with a file that is not staged."""
    git("init", "-q")
    git("config", "user.name", "a")
    git("config", "user.email", "a@b")
    if dvc:
        from dvc.repo import Repo

        Repo.init().close()
    Path("program.py").write_text("pass\n")
    if commits:
        git("add", ".")
        git("commit", "-q", "-m", "a")
        Path("program.py").write_text("changed\n")
    return git("status", "--porcelain"), git("ls-files", "--stage"), git("for-each-ref")


@pytest.mark.parametrize("dvc", [False, True])
@pytest.mark.parametrize("commits", [False, True])
def test_a_git_repository_is_left_as_it_was(commits, dvc, directory):
    from dvclive import live

    status, index, refs = repository(commits, dvc)
    find = live.get_dvc_repo
    tracker = recorded((0, {"loss": 1.0}), (1, {"loss": 0.5}))
    assert tracker.tracker.summary["loss"] == 0.5
    assert set(git("status", "--porcelain").splitlines()) == {*status.splitlines(), "?? dvclive/"}
    assert (git("ls-files", "--stage"), git("for-each-ref")) == (index, refs)
    assert (directory / ".dvc").is_dir() is dvc
    assert live.get_dvc_repo is find


def test_an_experiment_of_dvc_is_made_on_request(directory, monkeypatch):
    monkeypatch.setattr("tqdm.std.tqdm.monitor_interval", 0)  # else DVC's bars of progress keep a thread
    repository(commits=True)
    recorded((0, {"loss": 1.0}), save_dvc_exp=True)
    assert (directory / ".dvc").is_dir()
    assert "refs/exps" in git("for-each-ref")


def test_without_a_folder_of_its_own_it_writes_to_that_of_the_run(directory):
    tracker = DVCLive()
    assert tracker.requires_logging_directory
    assert not DVCLive(dir=Path("dvclive")).requires_logging_directory
    tracker.start(TrackedRun("project", "run-1", directory=directory / "runs" / "project" / "run-1"))
    tracker.log({"loss": 0.5}, 0)
    tracker.finish(failed=False)
    assert (directory / "runs/project/run-1/metrics.json").exists()
    assert not (directory / "dvclive").exists()
